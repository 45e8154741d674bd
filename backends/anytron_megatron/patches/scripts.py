"""Fixes of Megatron-LM's own scripts, which ``anytron-megatron`` runs."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NoReturn

from anytron.base.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable


def allow_no_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``initialize_megatron``, which demands that ``torch.cuda.is_available()``: turn off this demand alone."""
    return functools.partial(original, allow_no_cuda=True)


def load_no_kernels(_original: Callable[..., Any]) -> Callable[..., None]:
    """Replace ``megatron.legacy.fused_kernels.load``, which only runs nvcc to read its version, by an empty one."""
    return lambda _args: None


def refuse_batch_invariance(_original: Callable[..., None]) -> Callable[..., NoReturn]:
    """Replace ``enable_batch_invariant_mode``, which replaces torch's operators and Transformer Engine's by kernels."""

    def enable_batch_invariant_mode() -> NoReturn:
        raise EngineError(
            "The portable Transformer Engine has no batch-invariant mode.",
            where="megatron.core.transformer.custom_layers.batch_invariant_kernels, enable_batch_invariant_mode",
            why="Megatron's batch-invariant kernels replace functions of NVIDIA's Transformer Engine",
            fix="remove --batch-invariant-mode (batch_invariant_mode=False)",
        )

    return enable_batch_invariant_mode
