"""The public modules: what other packages may import. Everything else is private.

The public names of a module are listed in its ``__all__``; :mod:`anytron.public.document` writes them all into
``docs/reference/api.md``.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

MODULES: Mapping[str, str] = MappingProxyType(
    {
        "anytron": "Platforms and other plugins",
        "anytron.kernels": "Kernels of a platform",
        "anytron.kernels.fused": "The neutral fused kernels, whose signatures are the contract of each",
        "anytron.sequences": "Layouts of sequences, and masks",
        "anytron.sequences.scopes": "What lasts for a micro-batch's forward pass, and for its recomputation",
        "anytron.tasks": "Prompts, rewards, environments, losses, sinks: what a configuration names",
        "anytron.train": "Programs that bring their own trainer",
        "anytron.verification": "The checks of `anytron verify` and `anytron doctor`, for other trainers",
        "anytron.engines": "Engines that a plugin offers",
        "anytron_conformance": "The conformance kit: the test suite of every platform",
        "anytron_megatron": "Trainers and engines on Megatron",
        "anytron_rollout": "Rollouts on transformers",
        "anytron_vllm": "Rollouts on vLLM",
    }
)
"""The purpose of each public module, by the module's name."""
