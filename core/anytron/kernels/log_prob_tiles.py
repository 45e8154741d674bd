"""What is wanted of a tile of logits, and the way to compute it in pure torch.

The formulas, and the names m, s and e, are in :mod:`anytron.kernels.log_prob`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """What a rank computes with.

    Attributes:
        hidden: ``[N, H]``.
        weight: ``[R, H]``: this rank's rows of the output layer, without those that fill it up.
        labels: int64 ``[N]``: rows of ``weight``; -1 = ignored, or another rank's.
        temperature: Logits are divided by it.
        width: Entries of the vocabulary in one tile.
    """

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    temperature: float
    width: int

    def tiles(self) -> Iterator[slice]:
        """Give the rows of each tile."""
        return (slice(begin, begin + self.width) for begin in range(0, len(self.weight), self.width))


@dataclass(frozen=True)
class Upstream:
    """What the gradients of logits depend on besides them: each float32 ``[N]``.

    Attributes:
        peak: The highest logit m of all ranks, divided by the temperature as all logits.
        log_total: log s.
        mean: e / s, the mean of the logits less ``peak``.
        grad_log_probs: Of the loss; 0 where the label is ignored.
        grad_entropy: The same.
    """

    peak: Tensor
    log_total: Tensor
    mean: Tensor
    grad_log_probs: Tensor
    grad_entropy: Tensor


class TileArithmetic(Protocol):
    """Compute what is wanted of logits, tile by tile."""

    def statistics(self, shard: Shard) -> Tensor:
        """Sum up tiles, whichever it likes: float32 ``[tiles, 4, N]`` of m, s, e and the label's logit.

        The logit is 0 where the tile does not have the label.
        """

    def gradients(self, shard: Shard, upstream: Upstream) -> Iterator[tuple[slice, Tensor]]:
        """Give the rows of each tile, and the gradient of its undivided logits: ``[N, rows]`` as the weight's dtype.

        The gradient may be overwritten when the next one is asked for.
        """


class TorchTiles:
    """Make a tile's logits in memory, and compute with them in place: two tiles of float32 exist at a time.

    The two are made once per pass, because fresh memory costs a processor as much as a sweep over it.
    """

    def statistics(self, shard: Shard) -> Tensor:
        """As :meth:`TileArithmetic.statistics`."""
        memory = _Memory(shard)
        parts = []
        for rows in shard.tiles():
            logits, weights = memory.logits(rows), memory.second(rows)
            peak = logits.amax(dim=1)
            here, column = _columns(shard, rows)
            label_logit = logits.gather(1, column[:, None])[:, 0].masked_fill(~here, 0.0)
            shifted = logits.sub_(peak[:, None])
            torch.exp(shifted, out=weights)
            total = weights.sum(dim=1)
            moment = weights.mul_(shifted).sum(dim=1)
            parts.append(torch.stack([peak, total, moment, label_logit]))
        return torch.stack(parts)

    def gradients(self, shard: Shard, upstream: Upstream) -> Iterator[tuple[slice, Tensor]]:
        """As :meth:`TileArithmetic.gradients`."""
        memory = _Memory(shard)
        positions = torch.arange(shard.hidden.shape[0], device=shard.hidden.device)
        grad_log_probs = upstream.grad_log_probs / shard.temperature
        grad_entropy = upstream.grad_entropy / shard.temperature
        for rows in shard.tiles():
            logits, probs = memory.logits(rows), memory.second(rows)
            shifted = logits.sub_(upstream.peak[:, None])
            torch.sub(shifted, upstream.log_total[:, None], out=probs).exp_()
            shifted.sub_(upstream.mean[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_log_probs[:, None])
            grad = probs.mul_(shifted)
            here, column = _columns(shard, rows)
            # Not scatter_add_, which on some devices is refused where results must not vary from run to run.
            grad.index_put_((positions, column), grad_log_probs * here, accumulate=True)
            yield rows, grad.to(shard.weight.dtype)


class _Memory:
    """Two tiles in float32."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        size = shard.hidden.shape[0] * shard.width
        self._first, self._second = (shard.hidden.new_empty(size, dtype=torch.float32) for _ in range(2))

    def logits(self, rows: slice) -> Tensor:
        """The first tile, float32 ``[N, rows]``: the logits divided by the temperature."""
        shard = self._shard
        logits, weight = self._cut(self._first, rows), shard.weight[rows].t()
        if shard.weight.dtype == logits.dtype:
            torch.mm(shard.hidden, weight, out=logits)
        else:
            logits.copy_(shard.hidden @ weight)
        return logits if shard.temperature == 1.0 else logits.div_(shard.temperature)

    def second(self, rows: slice) -> Tensor:
        """The second tile, float32 ``[N, rows]``, whatever it holds."""
        return self._cut(self._second, rows)

    def _cut(self, memory: Tensor, rows: slice) -> Tensor:
        tokens, width = self._shard.hidden.shape[0], len(self._shard.weight[rows])
        return memory[: tokens * width].view(tokens, width)


def _columns(shard: Shard, rows: slice) -> tuple[Tensor, Tensor]:
    """Which tokens have their label in this tile, and its column there, 0 for the others."""
    here = (shard.labels >= rows.start) & (shard.labels < rows.stop)
    return here, (shard.labels - rows.start).masked_fill(~here, 0)
