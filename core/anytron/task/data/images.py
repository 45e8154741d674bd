"""Images, prepared by the processor of a vision-language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

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

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.pixel_values.nbytes + self.grid_thw.nbytes


def joined_images(parts: Iterable[ImagePatches | None]) -> ImagePatches | None:
    """Return the images of all parts of a sequence, in order; None if there are none."""
    found = [part for part in parts if part is not None]
    if len(found) < 2:
        return found[0] if found else None
    values = torch.cat([part.pixel_values for part in found])
    return ImagePatches(values, torch.cat([part.grid_thw for part in found]))
