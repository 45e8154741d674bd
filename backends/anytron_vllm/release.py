"""Differences between the versions of vLLM that this engine supports: the only place that compares versions.

Each entry of :data:`FLAWS` names versions that cannot do something, the reason, and its source. Imports no vLLM, except
in functions that run in vLLM's processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from packaging.specifiers import SpecifierSet

if TYPE_CHECKING:
    from torch import nn

SUPPORTED = SpecifierSet(">=0.23,<0.34")
"""Minor versions that the engine supports. The page ``docs/how-to/roll-out-with-vllm.md`` says which ones have run."""

NORMALIZES_IMAGES = SpecifierSet(">=0.28")
"""Versions whose vision towers normalise bytes themselves, unless ``mm_device_do_normalize`` is False. Earlier ones
take normalised patches, and do not know the argument (vllm/engine/arg_utils.py)."""


@dataclass(frozen=True)
class Flaw:
    """Something that some versions of vLLM cannot do.

    Attributes:
        asked: What a run asks for: experts on a processor.
        versions: Versions that cannot do it.
        why: The reason, with the source.
    """

    asked: Literal["experts on a processor"]
    versions: SpecifierSet
    why: str


FLAWS = (
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
)


def flaw(version: str, asked: str) -> str | None:
    """Return why a version of vLLM cannot do what a run asks for; None if it can."""
    found = (one.why for one in FLAWS if one.asked == asked and one.versions.contains(version, prereleases=True))
    return next(found, None)


def normalizes_images(version: str) -> bool:
    """Return whether a version of vLLM normalises images by itself, unless an argument says no."""
    return NORMALIZES_IMAGES.contains(version, prereleases=True)


def is_deferred_attention(layer: nn.Module) -> bool:
    """Return whether vLLM processes a layer's weights after all other layers'. Runs in vLLM's processes."""
    from vllm.model_executor.layers import attention

    if hasattr(attention, "is_deferred_attention_layer"):  # from 0.28 on
        return bool(attention.is_deferred_attention_layer(layer))
    return isinstance(layer, (attention.Attention, attention.MLAAttention))
