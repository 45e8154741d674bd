"""Say how far two correct computations may differ.

Both add the same products in a different order. The error grows with the size of the numbers, so a
tolerance is a factor times the largest of them (at least 1). The factors are about 100 roundings of
float32 (2**-23), and about 4 of bfloat16 (2**-8) and of float16 (2**-11). Tiny models in float32 stay
below 2e-6; a wrong layer (a mask, a weight, a sum over ranks) is off by 1e-2 of the numbers' size or more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

FACTORS = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1.6e-2, "float16": 2e-3}
"""By the name of a dtype, as in ``model.dtype``."""


def tolerance(dtype: str, values: Tensor) -> float:
    """Return the largest difference allowed between two computations of ``values`` in ``dtype``."""
    scale = float(values.abs().max()) if values.numel() else 1.0
    return FACTORS[dtype] * max(1.0, scale)
