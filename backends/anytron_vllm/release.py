"""Differences between the versions of vLLM that this engine supports: the only place that compares versions.

Each entry of :data:`FLAWS` names versions that cannot do something, the reason, and its source. Only
:func:`is_deferred_attention`, which runs in vLLM's processes, imports vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

if TYPE_CHECKING:
    from torch import nn

SUPPORTED = SpecifierSet(">=0.23,<0.34")
"""Minor versions that the engine supports. The page ``docs/how-to/roll-out-with-vllm.md`` says which ones have run."""

NORMALIZES_IMAGES = SpecifierSet(">=0.28")
"""Versions whose vision towers normalise bytes themselves, unless ``mm_device_do_normalize`` is False. Earlier ones
take normalised patches, and do not know the argument (vllm/engine/arg_utils.py)."""


IMAGES_TESTED = SpecifierSet("==0.32.*")
"""Versions with which the tests of models that take images have run."""

Asked = Literal[
    "quantized weights",
    "quantized weights on a processor",
    "experts on a processor",
    "routing on a processor",
    "routing of responses that continue",
    "routing without a prefix cache",
]


@dataclass(frozen=True)
class Flaw:
    """Something that some versions of vLLM cannot do.

    Attributes:
        asked: What a run asks for: weights in 8 bits (``rollout.quantization``); the same on a processor; experts on a
            processor; their routing there (``rollout.replay_routing``); routing of responses that continue over an
            update of the weights; routing without the prefix cache.
        versions: Versions that cannot do it.
        why: The reason, with the source.
    """

    asked: Asked
    versions: SpecifierSet
    why: str


FLAWS = (
    Flaw(
        "quantized weights",
        SpecifierSet("<0.24"),
        "it does not know fp8_per_channel (vllm/model_executor/layers/quantization/__init__.py)",
    ),
    Flaw(
        "quantized weights on a processor",
        SpecifierSet("<0.28"),
        "it rounds them with dynamic_per_token_scaled_fp8_quant, which its build for CPUs lacks "
        "(vllm/model_executor/layers/quantization/online/fp8.py)",
    ),
    Flaw(
        "experts on a processor",
        SpecifierSet("<0.25"),
        "it builds the experts' activation where its configuration is not set, and stops "
        "(vllm/model_executor/layers/fused_moe/cpu_fused_moe.py)",
    ),
    Flaw(
        "experts on a processor",
        SpecifierSet(">=0.27,<0.28"),
        "its AMX kernel for experts refuses each intermediate size, multiples of 32 too",
    ),
    Flaw(
        "routing on a processor",
        SpecifierSet("<0.28"),
        "its kernel for experts chooses them itself, past what records them, and the record would hold zeros "
        "(vllm/model_executor/layers/fused_moe/cpu_fused_moe.py)",
    ),
    Flaw(
        "routing on a processor",
        SpecifierSet(">=0.28,<0.30"),
        "its kernel for experts chooses them itself and records none "
        "(vllm/model_executor/layers/fused_moe/experts/cpu_moe.py)",
    ),
    Flaw(
        "routing on a processor",
        SpecifierSet(">=0.31"),
        "only its second model runner records experts, and that one needs Triton "
        "(vllm/config/vllm.py, _verify_aux_output_compatibility)",
    ),
    Flaw(
        "routing of responses that continue",
        SpecifierSet(">=0.31,<0.32"),
        "while it records experts, it does not empty its cache as long as responses are under way "
        "(vllm/v1/core/sched/scheduler.py, reset_prefix_cache)",
    ),
    Flaw(
        "routing of responses that continue",
        SpecifierSet(">=0.32"),
        "no test knows what it records for a response that it computes again, because it records on accelerators only",
    ),
    Flaw(
        "routing without a prefix cache",
        SpecifierSet(">=0.31"),
        "it keeps the experts by blocks of the prefix cache (vllm/config/vllm.py, _verify_aux_output_compatibility)",
    ),
)


def is_in(version: str, versions: SpecifierSet) -> bool:
    """Return whether a version is in a range; a release candidate counts as its release."""
    return versions.contains(Version(version).base_version)


def flaw(version: str, asked: Asked) -> str | None:
    """Return why a version of vLLM cannot do what a run asks for; None if it can."""
    return next((one.why for one in FLAWS if one.asked == asked and is_in(version, one.versions)), None)


def normalizes_images(version: str) -> bool:
    """Return whether a version of vLLM normalises images by itself, unless an argument says no."""
    return is_in(version, NORMALIZES_IMAGES)


def is_deferred_attention(layer: nn.Module) -> bool:
    """Return whether vLLM processes a layer's weights after all other layers'. Runs in vLLM's processes."""
    from vllm.model_executor.layers import attention

    if hasattr(attention, "is_deferred_attention_layer"):  # from 0.28 on
        return bool(attention.is_deferred_attention_layer(layer))
    return isinstance(layer, (attention.Attention, attention.MLAAttention))
