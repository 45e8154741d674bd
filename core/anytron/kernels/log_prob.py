"""Token log-probabilities and entropies from hidden states, vocabulary-parallel, without holding whole logits.

The logits of a packed micro-batch are by far its largest tensor (16,384 tokens x 150,000 entries in
float32: 10 GB), and only two numbers per token are computed from them. So logits are computed for one tile (a range of
entries) of the vocabulary at a time, in the forward pass and again in the backward pass, and never kept.

With z the logits divided by the temperature, y the label, p = softmax(z) and E = sum_j p_j z_j::

    log p_y = z_y - logsumexp(z)           d log p_y / d z_j = [j = y] - p_j
    H       = logsumexp(z) - E             d H / d z_j       = -p_j (z_j - E)

A tile t of the vocabulary gives ``m_t = max z``, ``s_t = sum exp(z - m_t)`` and ``e_t = sum exp(z - m_t) (z - m_t)``.
With ``m = max_t m_t``, over all tiles and all ranks, ``s = sum_t exp(m_t - m) s_t`` and
``e = sum_t exp(m_t - m) (e_t + (m_t - m) s_t)``::

    log p_y = (z_y - m) - log s            p_j = exp((z_j - m) - log s)
    H       = log s - e / s                z_j - E = (z_j - m) - e / s

Nothing is computed from logsumexp(z) and E themselves: where logits are large and the entropy is small, float32 would
lose its digits in their difference.

In the backward pass a tile's rows of the weight get their whole gradient at once; what is added up over tiles is the
gradient of the hidden states. (In chunks of tokens it would be the other way round, and a sum in float32 as large as
the weight would be needed.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from anytron.kernels.invariant import ROWS, filled_up, product

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import ProcessGroup

    from anytron.kernels.contract import LogProbKernel, LogProbSpec


NARROWEST_TILE = 1024
"""Least width of a tile, in entries of the vocabulary. Such a tile is rarely larger than the hidden states, and matrix
products with narrower tiles are slow (two cores, 2048 tokens: with 512 entries four times as slow as with 2048)."""

_MULTIPLE = 128
"""Widths of tiles are multiples of it, so that tensor cores compute whole blocks."""

_INVARIANT_WIDTH = 4096
"""Entries of a tile if results must not depend on the number of tokens, nor on how a vocabulary is filled up."""


def make_log_prob(spec: LogProbSpec, arithmetic: TileArithmetic | None = None) -> LogProbKernel:
    """Make a log-prob kernel; without ``arithmetic``, the pure torch default of the hook ``log_prob_kernel``.

    A tile has at most as many logits as ``spec.chunk_tokens`` tokens have on one rank, but at least
    :data:`NARROWEST_TILE` logits per token. The neutral default computes logits in the weight's element type and
    everything after them in float32. It holds two tiles in float32, and with a 16-bit weight one more tile in the
    weight's type. With ``spec.invariant``, tiles have one width, and tokens are computed in parts.
    """
    tiles = TorchTiles(invariant=spec.invariant) if arithmetic is None else arithmetic

    def log_prob(
        hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, group: ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        log_probs, entropy = _LogProb.apply(hidden, weight, labels, temperature, spec, group, tiles)  # type: ignore[no-untyped-call]
        return log_probs, entropy

    return log_prob


def tile_width(tokens: int, entries: int, chunk_tokens: int) -> int:
    """Return the number of vocabulary entries in a tile, such that all tiles are about equally wide.

    Args:
        tokens: Number of tokens whose logits a tile holds.
        entries: Number of vocabulary entries on this rank.
        chunk_tokens: A tile holds at most ``chunk_tokens * entries`` logits, unless it would be narrower than
            :data:`NARROWEST_TILE`.
    """
    if tokens <= chunk_tokens or entries <= NARROWEST_TILE:
        return max(1, entries)
    widest = max(NARROWEST_TILE, chunk_tokens * entries // tokens // _MULTIPLE * _MULTIPLE)
    tiles = -(-entries // widest)
    return -(-entries // tiles // _MULTIPLE) * _MULTIPLE


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        spec: LogProbSpec,
        group: ProcessGroup | None,
        arithmetic: TileArithmetic,
    ) -> tuple[Tensor, Tensor]:
        group = group if group is not None and dist.get_world_size(group) > 1 else None
        start = weight.shape[0] * (dist.get_rank(group) if group is not None else 0)
        # Megatron pads the vocabulary to a multiple of the tensor-parallel size; those rows are not tokens.
        rows = max(0, min(weight.shape[0], spec.vocab_size - start))
        local = labels - start
        local = local.masked_fill((labels < 0) | (local < 0) | (local >= rows), -1)
        width = tile_width(hidden.shape[0], rows, spec.chunk_tokens)
        shard = Shard(hidden, weight[:rows], local, temperature, width)
        if spec.invariant:
            statistics = _invariant_statistics(shard, arithmetic, weight.shape[0], spec.chunk_tokens, group)
            peak, log_total, mean, label_logit = _merge(statistics, None)[:, : hidden.shape[0]]
        else:
            peak, log_total, mean, label_logit = _merge(_statistics(shard, arithmetic), group)
        ctx.save_for_backward(hidden, weight, labels, local, peak, log_total, mean)
        ctx.settings = (temperature, rows, width, arithmetic)
        ignored = labels < 0
        log_probs = (label_logit - peak - log_total).masked_fill(ignored, 0.0)
        entropy = (log_total - mean).masked_fill(ignored, 0.0)
        return log_probs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, local, peak, log_total, mean = ctx.saved_tensors
        temperature, rows, width, arithmetic = ctx.settings
        ignored = labels < 0
        shard = Shard(hidden, weight[:rows], local, temperature, width)
        upstream = Upstream(
            *(peak, log_total, mean),
            *(grad.masked_fill(ignored, 0.0) for grad in (grad_log_probs, grad_entropy)),
        )
        # float32, because many tiles are added up.
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for tile, grad in arithmetic.gradients(shard, upstream):
            if grad_weight is not None:
                torch.mm(grad.t(), hidden, out=grad_weight[:rows][tile])
            if grad_hidden is not None:
                _add_product(grad_hidden, grad, shard.weight[tile])
        grad_hidden = grad_hidden.to(hidden.dtype) if grad_hidden is not None else None
        return grad_hidden, grad_weight, None, None, None, None, None


def _statistics(shard: Shard, arithmetic: TileArithmetic) -> Tensor:
    if len(shard.weight):
        return arithmetic.statistics(shard)
    # The last ranks may hold nothing but what fills the vocabulary up.
    nothing = shard.hidden.new_zeros((1, 4, shard.hidden.shape[0]), dtype=torch.float32)
    nothing[:, 0] = -torch.inf
    return nothing


def _invariant_statistics(
    shard: Shard, arithmetic: TileArithmetic, entries: int, chunk_tokens: int, group: ProcessGroup | None
) -> Tensor:
    """Statistics of all ranks' tiles, in the order of the vocabulary, so that they are added up in one order.

    Tokens are filled up to a multiple of a tile's rows: vectorised functions compute the rest of a tensor otherwise.

    Args:
        shard: The operands.
        arithmetic: Computes the statistics.
        entries: Vocabulary entries on each rank, padding included.
        chunk_tokens: As ``LogProbSpec.chunk_tokens``.
        group: The ranks.
    """
    width = _INVARIANT_WIDTH
    tokens = max(ROWS, chunk_tokens * entries // width // ROWS * ROWS)
    hidden = filled_up(shard.hidden, ROWS)
    labels = functional.pad(shard.labels, (0, hidden.shape[0] - shard.hidden.shape[0]), value=-1)
    parts = [
        _statistics(Shard(rows, shard.weight, wanted, shard.temperature, width), arithmetic)
        for rows, wanted in zip(hidden.split(tokens), labels.split(tokens), strict=True)
    ]
    own = torch.cat(parts, dim=2)
    if group is None:
        return own
    nothing = own.new_zeros(-(-entries // width), *own.shape[1:])
    nothing[:, 0] = -torch.inf
    nothing[: len(own)] = own
    every = nothing.new_empty(dist.get_world_size(group) * len(nothing), *nothing.shape[1:])
    dist.all_gather_into_tensor(every, nothing, group=group)
    return every


def _merge(statistics: Tensor, group: ProcessGroup | None) -> Tensor:
    """Merge all tiles of all ranks: m, log s, e / s and the label's logit, float32 ``[4, N]``."""
    peaks, totals, moments, label_logits = statistics.unbind(1)
    peak = peaks.amax(dim=0)
    if group is not None:
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    gaps = (peaks - peak).clamp_(min=-200.0)  # exp(-200) is 0, and so is -200 times that; with -inf it would not be
    scales = gaps.exp()
    sums = torch.stack([(scales * totals).sum(0), (scales * (moments + gaps * totals)).sum(0), label_logits.sum(0)])
    if group is not None:
        dist.all_reduce(sums, group=group)
    total, moment, label_logit = sums
    return torch.stack([peak, total.log(), moment / total, label_logit])


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to a sum in float32, without a tensor for the product where torch can."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


@dataclass(frozen=True)
class Shard:
    """The operands of the log-prob kernel on one rank.

    Attributes:
        hidden: Hidden states ``[N, H]``.
        weight: ``[R, H]``: this rank's rows of the output layer, without padding rows.
        labels: int64 ``[N]``: each label as a row of ``weight``; -1 = the label is ignored or on another rank.
        temperature: Logits are divided by it.
        width: Entries of the vocabulary in one tile.
    """

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    temperature: float
    width: int

    def tiles(self) -> Iterator[slice]:
        """Yield for each tile the slice of its rows of ``weight``."""
        return (slice(begin, begin + self.width) for begin in range(0, len(self.weight), self.width))


@dataclass(frozen=True)
class Upstream:
    """Values per token, each float32 ``[N]``, from which gradients are computed together with the logits.

    Attributes:
        peak: m, the highest logit of all ranks after division by the temperature.
        log_total: log s.
        mean: e / s, the mean of the logits under the softmax, minus ``peak``.
        grad_log_probs: Gradient of the loss with respect to the log-probs; 0 where the label is ignored.
        grad_entropy: Gradient of the loss with respect to the entropies; 0 where the label is ignored.
    """

    peak: Tensor
    log_total: Tensor
    mean: Tensor
    grad_log_probs: Tensor
    grad_entropy: Tensor


class TileArithmetic(Protocol):
    """Compute the logits of a rank tile by tile, and reduce them to statistics or gradients."""

    def statistics(self, shard: Shard) -> Tensor:
        """Return m, s, e and the label's logit of each tile and token: float32 ``[tiles, 4, N]``.

        The label's logit is 0 in tiles that do not contain the label. Tiles may have any width.
        """

    def gradients(self, shard: Shard, upstream: Upstream) -> Iterator[tuple[slice, Tensor]]:
        """Yield (rows, gradient) of each tile; the gradient ``[N, rows]`` belongs to the tile's products.

        It is the gradient of the products of hidden states and weights, in the weight's dtype. It may be overwritten
        when the next tile is requested.
        """


@dataclass(frozen=True)
class Cap:
    """How a model limits its logits: to ``c tanh(s x / c)``, for the products x of hidden states and weights.

    Attributes:
        limit: c, ``final_logit_softcapping`` in configs of transformers.
        scale: s, ``output_multiplier`` in the config of Muse Glimmer.
    """

    limit: float
    scale: float = 1.0

    def of(self, products: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the logits; written to ``out``, which may be ``products``, if it is given."""
        squashed = torch.tanh(torch.div(products, self.limit / self.scale, out=out), out=out)
        return torch.mul(squashed, self.limit, out=out)


class TorchTiles:
    """Compute a tile's logits in memory and work on them in place, so that only two float32 tiles exist at a time.

    The tiles are allocated once per pass, because on a CPU new memory costs as much time as computing on it.

    Args:
        cap: How the products become logits, before their division by the temperature; the backward pass then has a
            third tile. None = the products are the logits.
        invariant: Whether a token's logits must not depend on the other tokens of the call.
    """

    def __init__(self, cap: Cap | None = None, *, invariant: bool = False) -> None:
        self._cap, self._invariant = cap, invariant

    def statistics(self, shard: Shard) -> Tensor:
        """As :meth:`TileArithmetic.statistics`."""
        memory = _Memory(shard, self._cap, tiles=2, invariant=self._invariant)
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
        memory = _Memory(shard, self._cap, tiles=2 if self._cap is None else 3)
        positions = torch.arange(shard.hidden.shape[0], device=shard.hidden.device)
        per_product = (1.0 if self._cap is None else self._cap.scale) / shard.temperature
        grad_log_probs = upstream.grad_log_probs * per_product
        grad_entropy = upstream.grad_entropy * per_product
        for rows in shard.tiles():
            logits, probs = memory.logits(rows), memory.second(rows)
            slope = memory.slope(rows, logits)
            shifted = logits.sub_(upstream.peak[:, None])
            torch.sub(shifted, upstream.log_total[:, None], out=probs).exp_()
            shifted.sub_(upstream.mean[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_log_probs[:, None])
            grad = probs.mul_(shifted)
            here, column = _columns(shard, rows)
            # Not scatter_add_, which on some devices is refused where results must not vary from run to run.
            grad.index_put_((positions, column), grad_log_probs * here, accumulate=True)
            if slope is not None:
                grad.mul_(slope)
            yield rows, grad.to(shard.weight.dtype)


class _Memory:
    """Two or three tiles in float32."""

    def __init__(self, shard: Shard, cap: Cap | None, *, tiles: int, invariant: bool = False) -> None:
        self._shard, self._cap, self._invariant = shard, cap, invariant
        size = shard.hidden.shape[0] * shard.width
        self._tiles = [shard.hidden.new_empty(size, dtype=torch.float32) for _ in range(tiles)]

    def logits(self, rows: slice) -> Tensor:
        """The first tile, float32 ``[N, rows]``: the logits divided by the temperature."""
        shard = self._shard
        logits, weight = self._cut(0, rows), shard.weight[rows]
        if self._invariant:
            logits.copy_(product(shard.hidden, weight))
        elif weight.dtype == logits.dtype:
            torch.mm(shard.hidden, weight.t(), out=logits)
        else:
            logits.copy_(shard.hidden @ weight.t())
        if self._cap is not None:
            self._cap.of(logits, out=logits)
        return logits if shard.temperature == 1.0 else logits.div_(shard.temperature)

    def second(self, rows: slice) -> Tensor:
        """The second tile, float32 ``[N, rows]``, whatever it holds."""
        return self._cut(1, rows)

    def slope(self, rows: slice, logits: Tensor) -> Tensor | None:
        """The third tile, float32 ``[N, rows]``: 1 - tanh(s x / c)^2, by which a cap multiplies gradients; else None.

        ``logits`` are those of the tile, divided by the temperature.
        """
        if self._cap is None:
            return None
        torch.mul(logits, self._shard.temperature / self._cap.limit, out=self._cut(2, rows))
        return self._cut(2, rows).square_().neg_().add_(1.0)

    def _cut(self, tile: int, rows: slice) -> Tensor:
        tokens, width = self._shard.hidden.shape[0], len(self._shard.weight[rows])
        return self._tiles[tile][: tokens * width].view(tokens, width)


def _columns(shard: Shard, rows: slice) -> tuple[Tensor, Tensor]:
    """Which tokens have their label in this tile, and its column there, 0 for the others."""
    here = (shard.labels >= rows.start) & (shard.labels < rows.stop)
    return here, (shard.labels - rows.start).masked_fill(~here, 0)
