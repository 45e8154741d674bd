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

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anytron.kernels.chunks import between, chunks_of
from anytron.kernels.contract import zeros_from

if TYPE_CHECKING:
    from collections.abc import Sequence


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
    plan = chunks_of(rows, tokens, cu_seqlens, query.device)
    dtype = torch.promote_types(query.dtype, torch.float32)
    operands = (query, key, value, g[..., None], beta[..., None])
    reads, *others = (plan.cut(operand).to(dtype) for operand in operands)
    output = _scan(*_within_chunks(reads * scale, *others), plan.steps)
    return plan.join(output).to(query.dtype).view(rows, tokens, *value.shape[2:])


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
    decay = g.cumsum(dim=-2)
    fading = between(decay)
    system = (beta * key) @ key.transpose(-1, -2) * fading
    sides = torch.cat([beta * value, beta * key * decay.exp()], dim=-1)
    # Row i: its update, less what the updates of earlier rows answer to its key already. The diagonal
    # of `system` is not read: it stands for 1.
    own, answers = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True).split(
        [value.shape[-1], key.shape[-1]], dim=-1
    )
    last = decay[..., -1:, :]
    scores = query @ key.transpose(-1, -2) * fading
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
