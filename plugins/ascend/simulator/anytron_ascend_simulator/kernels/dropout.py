"""Masks of dropout: drawn as bits, and read by attention.

Source: documentation of ``aclnnDropoutGenMaskV2`` (CANN 8.5.0). Attention takes its result as ``drop_mask``, which has
one bit for each entry of ``[B, N, Sq, Skv]``, 1 = kept; in layout TND, one for each entry of ``[N, Sq, Skv]`` of the
first sequence, then of the second, and so on. The documentation does not define the order of bits in a byte; here
drawing and reading use the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron_ascend_simulator.kernels.contract import require
from anytron_ascend_simulator.random_numbers import host_seed

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

ALIGNMENT = 128
"""The number of bits is rounded up to a multiple of it."""
_BITS = torch.arange(8, dtype=torch.uint8)


class DropMask:
    """The dropout mask of one call of attention, read piece by piece.

    Args:
        bits: uint8; None = nothing is dropped.
        keep_prob: Probability that an entry is kept.
    """

    def __init__(self, bits: Tensor | None, keep_prob: float) -> None:
        require(0 < keep_prob <= 1, f"keep_prob is {keep_prob}, not in (0, 1]")
        require(
            (bits is None or bits.numel() == 0) == (keep_prob == 1), "drop_mask and a keep_prob below 1 belong together"
        )
        self._kept = None if keep_prob == 1 or bits is None else (bits[:, None] >> _BITS & 1).bool().flatten()
        self._taken = 0

    def take(self, *shape: int) -> Tensor | None:
        """Return the next entries: bool of this shape, True = kept; None without dropout."""
        if self._kept is None:
            return None
        start, self._taken = self._taken, self._taken + torch.Size(shape).numel()
        require(self._taken <= len(self._kept), f"drop_mask has {len(self._kept)} bits, but {self._taken} are needed")
        return self._kept[start : self._taken].view(shape)


def _draw(shape: list[int], drop_prob: float, seed: int, offset: int, _dtype: torch.dtype, target: Tensor) -> None:
    """``aclnnDropoutGenMaskV2``: the same seed and offset give the same bits."""
    require(0 <= drop_prob <= 1, f"prob is {drop_prob}, not in [0, 1]")
    bits = -(-torch.Size(shape).numel() // ALIGNMENT) * ALIGNMENT
    require(target.dtype == torch.uint8, f"out is {target.dtype}, not uint8")
    require(target.numel() == bits // 8, f"out has {target.numel()} bytes, but {bits // 8} are needed")
    kept = torch.rand(bits // 8, 8, generator=torch.Generator().manual_seed(host_seed(seed, offset))) >= drop_prob
    target.copy_((kept.to(torch.uint8) << _BITS).sum(-1, dtype=torch.uint8).view(target.shape))


KERNELS: dict[str, Callable[..., None]] = {"aclnnDropoutGenMaskV2": _draw}
