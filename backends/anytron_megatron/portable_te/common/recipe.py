"""Quantisation recipes: classes that Megatron subclasses or compares with; none of them can be instantiated."""

from __future__ import annotations

import enum

from anytron_megatron.portable_te.refusals import refuse


class Format(enum.Enum):
    """Formats of eight-bit floating-point numbers."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


class Recipe:
    """Base of all recipes."""

    def __init__(self, *_args: object, **_settings: object) -> None:
        refuse(type(self).__name__, "FP8 or FP4", "set fp8 and fp4 to null and train in bf16 or fp32")


class DelayedScaling(Recipe):
    """FP8 with scales computed from the largest values of earlier steps."""


class Float8CurrentScaling(Recipe):
    """FP8 with a scale per tensor."""


class Float8BlockScaling(Recipe):
    """FP8 with a scale per block."""


class MXFP8BlockScaling(Recipe):
    """FP8 with shared exponents."""


class NVFP4BlockScaling(Recipe):
    """FP4 with a scale per block."""
