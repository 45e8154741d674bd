"""Attention by its definition, in float64, and how far a platform's results are from it."""

from __future__ import annotations

from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anytron.kernels.oracles.masks import IN_PADDING, PADDING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anytron.base.traits import AttentionHeads, ModelTraits
    from anytron.kernels.oracles.masks import Attend
    from anytron.sequences.layout import SequenceLayout
    from anytron.sequences.masks import Pair


LENGTHS = (5, 1, 9, 4)
"""Real lengths of sequences; no alignment divides all of them."""

TOLERANCE: Mapping[torch.dtype, float] = MappingProxyType({torch.float32: 1e-4, torch.bfloat16: 0.05})
"""Largest difference of values and gradients, relative to the largest expected one: a thousand roundings of float32, a
dozen of bfloat16. A wrong pair of tokens makes a far larger difference."""


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    lengths: Sequence[int],
    scale: float,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    key_lengths: Sequence[int] | None = None,
    starts: Sequence[int] | None = None,
    key_starts: Sequence[int] | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend over packed sequences: a query sees the real keys of its own sequence that causality and window allow.

    Where queries and keys of a sequence differ in number, causality is aligned bottom right: the last query sees the
    last key.

    Args:
        query: ``[Tq, H, D]``.
        key: ``[Tk, G, D]``, H a multiple of G: query head h reads key head ``h // (H / G)``.
        value: ``[Tk, G, Dv]``.
        lengths: Real queries of each sequence.
        scale: Factor of the scores.
        causal: A query sees keys up to its own position only.
        window: (left, right) neighbours that a query sees; -1 = all on that side.
        key_lengths: Real keys of each sequence; None = ``lengths``.
        starts: First row of each sequence in ``query``; None = sequences follow each other without gaps.
        key_starts: First row of each sequence in ``key``; None = sequences follow each other without gaps.
        sinks: ``[H]`` logits that join the softmax's denominator.

    Returns:
        float64 ``[Tq, H, Dv]``, differentiable; zero for rows that are not real or see no key.
    """
    key_lengths = lengths if key_lengths is None else key_lengths
    sequence_q, position_q = _place(lengths, starts, query.shape[0])
    sequence_k, position_k = _place(key_lengths, key_starts, key.shape[0])
    real = (sequence_q[:, None] >= 0) & (sequence_k[None] >= 0)
    surplus = torch.tensor([k - q for q, k in zip(lengths, key_lengths, strict=True)])
    distance = (position_q + surplus[sequence_q])[:, None] - position_k[None]
    left, right = window or (-1, -1)
    seen = real & (sequence_q[:, None] == sequence_k[None])
    for hidden, applies in ((distance < 0, causal), (distance > left, left >= 0), (-distance > right, right >= 0)):
        seen = seen & ~hidden if applies else seen

    sinks = None if sinks is None else sinks.double()
    rows, columns, values = (operand.double()[None] for operand in (query, key, value))
    return attend_where(rows, columns, values, seen[None, None], scale, sinks)[0]


def attend_where(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Compute attention over the given pairs of queries and keys, in the type of the operands.

    Args:
        query: ``[B, Sq, H, D]``.
        key: ``[B, Sk, G, D]``, H a multiple of G: query head h reads key head ``h // (H / G)``.
        value: ``[B, Sk, G, Dv]``.
        seen: bool, broadcastable to ``[B, H, Sq, Sk]``, True = the query attends to the key.
        scale: Factor of the scores.
        sinks: ``[H]`` logits that join the softmax's denominator.

    Returns:
        ``[B, Sq, H, Dv]``, differentiable; zero for rows that see no key.
    """
    heads, groups = query.shape[2], key.shape[2]
    read = torch.tensor([head // (heads // groups) for head in range(heads)])
    key, value = key[:, :, read], value[:, :, read]
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * scale
    # Hidden scores are left out twice: of the peak, so that nothing overflows, and of the sum.
    blind = ~seen.any(-1, keepdim=True)
    peak = scores.masked_fill(~seen, -torch.inf).amax(-1, keepdim=True).masked_fill(blind, 0.0).detach()
    if sinks is not None:
        peak = peak.maximum(sinks.detach()[:, None, None])
    weights = torch.where(seen, (scores.masked_fill(~seen, 0.0) - peak).exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks[:, None, None] - peak).exp()
    weights = weights / total.masked_fill(total == 0, 1.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, value)


def _place(lengths: Sequence[int], starts: Sequence[int] | None, rows: int) -> tuple[Tensor, Tensor]:
    """Sequence (-1 = padding) and position in it, of each row."""
    if starts is None:
        starts = list(accumulate(lengths, initial=0))[:-1]
    sequence = torch.full((rows,), -1)
    position = torch.zeros(rows, dtype=torch.int64)
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        sequence[start : start + length] = index
        position[start : start + length] = torch.arange(length)
    return sequence, position


def drawn_operands(heads: AttentionHeads, dtype: torch.dtype) -> list[Tensor]:
    """Draw queries, keys and values ``[T, H, D]`` of sequences of :data:`LENGTHS`, on the host; equal on every rank."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads.heads, heads.qk_dim), (heads.kv_heads, heads.qk_dim), (heads.kv_heads, heads.v_dim))
    return [torch.randn(sum(LENGTHS), *shape, generator=generator).to(dtype) for shape in shapes]


def largest_difference(
    attend: Attend,
    operands: list[Tensor],
    layout: SequenceLayout,
    *,
    scale: float,
    traits: ModelTraits,
    sinks: Tensor | None = None,
) -> float:
    """Return how far outputs and gradients of this rank's real tokens are from :func:`reference_attention`.

    Args:
        attend: Function from queries, keys and values in this layout to the attention's output. It must run in the
            scope of the micro-batch. Sinks are not an argument: it uses ``sinks`` by itself.
        operands: Queries, keys and values as :func:`drawn_operands` returns them.
        layout: Layout of this rank, on the device.
        scale: Factor of the scores.
        traits: Traits of the layer; only ``causal`` and ``window`` are used.
        sinks: ``[H]`` logits that join the softmax's denominator, a leaf on the device.

    Returns:
        The largest absolute difference, relative to the largest expected value of its tensor. It is infinite if a
        gradient is missing or a number is not finite; in the output, padding counts too.
    """
    device = layout.token_index.device
    own = [] if sinks is None else [sinks]
    exact = [operand.detach().cpu().double().requires_grad_() for operand in (*operands, *own)]
    wanted = reference_attention(
        *exact[:3],
        lengths=LENGTHS,
        scale=scale,
        causal=traits.causal,
        window=traits.window,
        sinks=None if sinks is None else exact[3],
    )
    gradients = torch.autograd.grad(wanted.square().sum(), exact)
    padding = ~layout.valid[..., None, None]
    leaves = [layout.pack(operand.to(device), IN_PADDING).requires_grad_() for operand in operands]
    output = attend(*leaves)
    if not output.requires_grad or not bool(output.detach().cpu().isfinite().all()):
        return float("inf")
    output = output.masked_fill(padding, 0.0)
    found = torch.autograd.grad(output.float().square().sum(), (*leaves, *own), allow_unused=True)
    largest = 0.0
    for value, want in ((output.detach(), wanted.detach()), *zip(found, gradients, strict=True)):
        # On the host, so that a fault of the device's own arithmetic, or a lack of float64, is not the kernel's.
        if value is None or not bool((got := value.cpu().float()).isfinite().all()):
            return float("inf")
        expected = want.float()
        expected = expected if expected.dim() == 1 else layout.pack(expected.to(device)).cpu()
        largest = max(largest, float((got - expected).abs().max() / want.abs().max()))
    return largest


def described(wrong: set[Pair]) -> str:
    """Describe the pairs of tokens that attention wrongly includes or hides: their number, and the first one."""
    if not wrong:
        return "attends as defined"
    query, key = min(wrong)
    other = "padding" if key == PADDING else str(key)
    return f"has {len(wrong)} wrong pairs of tokens, such as {query} and {other}"
