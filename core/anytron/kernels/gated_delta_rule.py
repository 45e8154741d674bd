"""The gated delta rule, chunk by chunk: the neutral default of ``gated_delta_rule``.

Each head keeps a state ``M [K, V]``, a linear map from keys to values. Token t scales the state by
``exp(g)``, reads the value that the state has for the token's key, and moves it towards the token's own value
by the fraction ``beta``::

    M = exp(g[t]) M
    M = M + k[t] (beta[t] (v[t] - k[t] M))^T
    o[t] = scale * q[t] M

(Yang et al., Gated Delta Networks, arXiv:2412.06464, equation 10.) Within a chunk of C tokens the updates are one
triangular system, the WY form of arXiv:2406.06484 (section 3) with decay, so that only the states between chunks are
computed one after the other.

Shapes: B rows, S or T tokens, N chunks, H heads, K and V head sizes of keys and values, C tokens of a chunk.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from anytron.kernels.contract import zeros_from
from anytron.kernels.packed_sequences import Rows, rearrange, rows_from

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK = 64
"""Largest number of tokens in a chunk, as in Hugging Face and flash-linear-attention."""


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Divide by the Euclidean length over the last dimension: ``x / sqrt(sum(x^2) + eps)``.

    It is computed in float32 or wider, and returned in the type of ``x``. Same as ``l2norm`` of flash-linear-attention
    and Hugging Face; 0 stays 0 and has a finite gradient.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(dim=-1, keepdim=True) + eps)).to(x.dtype)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, scale: float, cu_seqlens: Tensor | None
) -> Tensor:
    """Run the gated delta rule over every sequence, from a state of zeros.

    There is no loop over sequences: all chunks of a micro-batch are computed together, and the states of
    all sequences advance together, so that the number of iterations is the number of chunks of the longest
    sequence. The arithmetic is float32 or wider.

    Args:
        query: ``[B, S, H, K]``, normalised by :func:`l2norm`; packed, ``[1, T, H, K]``.
        key: ``[B, S, H, K]``, normalised.
        value: ``[B, S, H, V]``.
        g: ``[B, S, H]``, logarithm of the state's decay before each token, <= 0.
        beta: ``[B, S, H]``, strength of the update, 0 to 1 (0: the token leaves the state as it is).
        scale: Factor of the output.
        cu_seqlens: int32 ``[N + 1]`` with a leading 0: tokens of the buffer at which packed sequences start, and the
            end of the last one; sequences may be empty. None = each row is a sequence.

    Returns:
        ``[B, S, H, V]`` in the type of ``query``; zero from the last entry of ``cu_seqlens`` on.
    """
    if query.numel() == 0 or value.numel() == 0:
        return zeros_from((*query.shape[:-1], value.shape[-1]), query, key, value, g, beta)
    rows, tokens = query.shape[:2]
    # The copy to the host waits for the device, as the layer that calls (mcore-bridge's) has done before.
    lengths = (tokens,) * rows if cu_seqlens is None else tuple(cu_seqlens.diff().tolist()) or (0,)
    plan = _plan(lengths, rows * tokens, query.device)
    dtype = torch.promote_types(query.dtype, torch.float32)
    operands = (query, key, value, g[..., None], beta[..., None])
    reads, *others = (plan.cut(operand).to(dtype) for operand in operands)
    output = _scan(*_within_chunks(reads * scale, *others), plan.steps)
    return plan.join(output).to(query.dtype).view(rows, tokens, *value.shape[2:])


class _Plan(NamedTuple):
    """How tokens lie in chunks: first chunks of all sequences, then second chunks of those that have one, ...

    Attributes:
        there: Buffer rows -> tokens of chunks.
        back: Tokens of chunks -> buffer rows.
        steps: How many sequences have a first chunk, a second chunk, ...; never increasing.
        size: C.
    """

    there: Rows
    back: Rows
    steps: tuple[int, ...]
    size: int

    def cut(self, operand: Tensor) -> Tensor:
        """``[B, S, H, X]`` -> ``[N, H, C, X]``, zero after a sequence's end."""
        flat = rearrange(operand.flatten(0, 1), self.there, self.back)
        return flat.view(-1, self.size, *flat.shape[1:]).transpose(1, 2)

    def join(self, chunks: Tensor) -> Tensor:
        """``[N, H, C, X]`` -> ``[B * S, H, X]``, zero where no sequence is."""
        return rearrange(chunks.transpose(1, 2).flatten(0, 1), self.back, self.there)


@functools.lru_cache(maxsize=32)
def _plan(lengths: Sequence[int], total: int, device: torch.device) -> _Plan:
    """Plan the chunks of sequences that follow one another; all layers of a micro-batch find the same plan."""
    sizes = torch.tensor(lengths)
    starts = sizes.cumsum(0) - sizes
    order = sizes.argsort(descending=True, stable=True)
    sizes, starts = sizes[order], starts[order]
    longest = max(1, int(sizes[0]))
    steps = math.ceil(longest / CHUNK)
    chunk = math.ceil(longest / steps)
    ranks = torch.arange(steps)
    # [steps, sequences]: sequences are sorted, so that those with a chunk of a rank come first.
    exists = sizes > ranks[:, None] * chunk
    exists[0, 0] = True  # where all sequences are empty, one chunk of nothing
    offset = ranks[:, None, None] * chunk + torch.arange(chunk)
    source = torch.where(offset < sizes[None, :, None], starts[None, :, None] + offset, -1)[exists].flatten()
    real = source >= 0
    back = torch.full((total,), -1)
    back[source[real]] = torch.arange(source.numel())[real]
    return _Plan(rows_from(source, device), rows_from(back, device), tuple(exists.sum(1).tolist()), chunk)


def _within_chunks(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute, for all chunks at once, the terms that do not depend on the state before the chunk.

    Args:
        query: ``[N, H, C, K]``, scaled.
        key: ``[N, H, C, K]``.
        value: ``[N, H, C, V]``.
        g: ``[N, H, C, 1]``.
        beta: ``[N, H, C, 1]``.

    Returns:
        With M the state before the chunk and ``updates = own - answers @ M`` ``[N, H, C, V]``: the
        output is ``reads @ M + scores @ updates``, and the state after it ``fade * M + writes^T @ updates``.
        In order: reads, scores, answers, own, writes, fade.
    """
    size = query.shape[-2]
    decay = g.cumsum(dim=-2)
    later = torch.ones(size, size, dtype=torch.bool, device=g.device).triu(1)
    # Decay from token j (column) to token i (row). Masked before exp: above the diagonal it may overflow.
    between = (decay - decay.transpose(-1, -2)).masked_fill(later, -torch.inf).exp()
    system = (beta * key) @ key.transpose(-1, -2) * between
    sides = torch.cat([beta * value, beta * key * decay.exp()], dim=-1)
    # Row i: its update, less what the updates of earlier rows answer to its key already. The diagonal
    # of `system` is not read: it stands for 1.
    own, answers = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True).split(
        [value.shape[-1], key.shape[-1]], dim=-1
    )
    last = decay[..., -1:, :]
    scores = query @ key.transpose(-1, -2) * between
    return query * decay.exp(), scores, answers, own, key * (last - decay).exp(), last.exp()


def _scan(
    reads: Tensor, scores: Tensor, answers: Tensor, own: Tensor, writes: Tensor, fade: Tensor, steps: Sequence[int]
) -> Tensor:
    """Walk from chunk to chunk, all sequences at once; ``[N, H, C, V]``."""
    split = (torch.split(operand, list(steps)) for operand in (reads, scores, answers, own, writes, fade))
    (_, score, _, update, write, _), *later = zip(*split, strict=True)
    # First chunks meet a state of zeros.
    outputs = [score @ update]
    state = write.transpose(-1, -2) @ update
    for read, score, answer, own_update, write, fading in later:
        state = state[: read.shape[0]]
        update = own_update - answer @ state
        outputs.append(read @ state + score @ update)
        state = fading * state + write.transpose(-1, -2) @ update
    return torch.cat(outputs)
