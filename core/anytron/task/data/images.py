"""Images, prepared by the processor of a vision-language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ImagePatches:
    """The images of one sequence, in the order of their tokens.

    Attributes:
        pixel_values: float32 ``[N, D]``: N patches of all images together, each flattened to
            ``D = channels * temporal_patch_size * patch_size ** 2`` normalised values.
        grid_thw: int64 ``[I, 3]``: temporal, vertical and horizontal number of patches of each image;
            the products add up to N.
    """

    pixel_values: Tensor
    grid_thw: Tensor
