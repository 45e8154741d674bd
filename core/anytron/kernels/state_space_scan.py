"""The state space model of Mamba-2, chunk by chunk: the neutral default of ``state_space_scan``.

Each head keeps a state ``M [N, P]``. Token t lets the state decay, adds its own input, and reads it::

    M = exp(dt[t] a) M + b[t] (dt[t] x[t])^T
    y[t] = c[t] M + d x[t]

(Dao and Gu, Transformers are SSMs, arXiv:2405.21060, equations 1 and 2 with the discretisation of section 4.5 of
arXiv:2312.00752.) Heads share ``b`` and ``c`` in G groups. Within a chunk of C tokens all outputs are two products of
matrices (the paper's section 6), so that only the states between chunks are computed one after the other.

Shapes: B rows, S or T tokens, K chunks, H heads in G groups of R, P entries of a head, N entries of a state, C tokens
of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anytron.kernels.chunks import between, chunks_of
from anytron.kernels.contract import zeros_from


def state_space_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, cu_seqlens: Tensor | None
) -> Tensor:
    """Run the recurrence over every sequence, from a state of zeros. The arithmetic is float32 or wider.

    Args:
        x: ``[B, S, H, P]``; packed, ``[1, T, H, P]``.
        dt: ``[B, S, H]``, length of each token's step, >= 0 (0: the token leaves the state as it is).
        a: ``[H]``, rate of the decay, < 0.
        b: ``[B, S, G, N]``, H a multiple of G: head h has the group ``h // (H / G)``.
        c: ``[B, S, G, N]``.
        d: ``[H]``, weight of a token's own input in its output.
        cu_seqlens: int32 ``[sequences + 1]`` with a leading 0: tokens of the buffer at which packed sequences start,
            and the end of the last one; sequences may be empty. None = each row is a sequence.

    Returns:
        ``[B, S, H, P]`` in the type of ``x``; zero from the last entry of ``cu_seqlens`` on.
    """
    if x.numel() == 0:
        return zeros_from(x.shape, x, dt, a, b, c, d)
    rows, tokens, heads = x.shape[:3]
    groups = b.shape[2]
    plan = chunks_of(rows, tokens, cu_seqlens, x.device)
    dtype = torch.promote_types(x.dtype, torch.float32)
    # [K, G, R, C, ...], the groups' own with R = 1
    inputs, steps = (plan.cut(part).to(dtype).unflatten(1, (groups, -1)) for part in (x, dt[..., None]))
    writes, reads = (plan.cut(part).to(dtype)[:, :, None] for part in (b, c))
    rate, own = (part.to(dtype).view(groups, -1, 1, 1) for part in (a, d))

    decay = (steps * rate).cumsum(dim=-2)
    weighted = steps * inputs
    last = decay[..., -1:, :]
    outputs = (reads @ writes.mT * between(decay)) @ weighted + own * inputs
    added = (writes * (last - decay).exp()).mT @ weighted
    outputs = torch.cat(_with_states(outputs, reads, decay, added, last.exp(), plan.steps))
    return plan.join(outputs.flatten(1, 2)).to(x.dtype).view(rows, tokens, heads, -1)


def _with_states(
    outputs: Tensor, reads: Tensor, decay: Tensor, added: Tensor, fade: Tensor, steps: tuple[int, ...]
) -> list[Tensor]:
    """Walk from chunk to chunk, all sequences at once; add what each chunk reads of the state before it."""
    split = (torch.split(operand, list(steps)) for operand in (outputs, reads, decay, added, fade))
    (first, _, _, state, _), *later = zip(*split, strict=True)
    # First chunks meet a state of zeros.
    complete = [first]
    for output, read, decayed, add, fading in later:
        state = state[: output.shape[0]]
        complete.append(output + decayed.exp() * (read @ state))
        state = fading * state + add
    return complete
