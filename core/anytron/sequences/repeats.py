"""Take rows, some of them several times, and add their gradients up again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Repeats:
    """Which of ``N`` rows ``K`` others are copies of.

    The way there is a gather, and so is the way back: a scatter-add is slow on processors, and on some devices not
    deterministic.

    Attributes:
        source: int64 ``[K]``, the row that each is a copy of.
    """

    source: Tensor
    _single: Tensor  # [N], the only copy of each row
    _other: Tensor  # the rows that have none, or several
    _repeated: Tensor  # [U], the rows that have several
    _copies: Tensor  # [U * most], the copies of those
    _missing: Tensor  # where there are fewer

    @classmethod
    def of(cls, source: Tensor, rows: int) -> Repeats:
        """Plan both ways, on the host.

        Args:
            source: int64 ``[K]`` below ``rows``.
            rows: N.
        """
        times = torch.bincount(source, minlength=rows)
        repeated = (times > 1).nonzero()[:, 0]
        single = torch.full((rows,), -1)
        single[source] = torch.arange(len(source))
        single[repeated] = -1
        # The copies of each repeated row, in their order, padded to the most that one has.
        number = torch.full((rows,), -1)
        number[repeated] = torch.arange(len(repeated))
        copies = (number[source] >= 0).nonzero()[:, 0]
        copies = copies[torch.argsort(number[source[copies]], stable=True)]
        counts = times[repeated]
        column = torch.arange(len(copies)) - torch.repeat_interleave(torch.cumsum(counts, 0) - counts, counts)
        table = torch.full((len(repeated), int(times.max())), -1)
        table[number[source[copies]], column] = copies
        table = table.flatten()
        return cls(
            source,
            single.clamp(min=0),
            (single < 0).nonzero()[:, 0],
            repeated,
            table.clamp(min=0),
            (table < 0).nonzero()[:, 0],
        )

    def to(self, device: torch.device) -> Repeats:
        """Copy to a device."""
        return Repeats(**{name: index.to(device, non_blocking=True) for name, index in vars(self).items()})

    def take(self, rows: Tensor) -> Tensor:
        """Copy rows: ``[N, ...]`` -> ``[K, ...]``. A row's gradient is the sum of its copies', in their order."""
        taken: Tensor = _Take.apply(rows, self)  # type: ignore[no-untyped-call]
        return taken

    def collect(self, copies: Tensor) -> Tensor:
        """Add up each row's copies: ``[K, ...]`` -> ``[N, ...]``, 0 where there is none. The transpose of taking."""
        collected = copies.index_select(0, self._single).index_fill_(0, self._other, 0)
        if not len(self._repeated):
            return collected
        several = copies.index_select(0, self._copies).index_fill_(0, self._missing, 0)
        sums = several.view(len(self._repeated), -1, *copies.shape[1:]).sum(1)
        return collected.index_copy_(0, self._repeated, sums)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, repeats: Repeats) -> Tensor:
        ctx.repeats = repeats
        return rows.index_select(0, repeats.source)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.repeats.collect(gradients), None
