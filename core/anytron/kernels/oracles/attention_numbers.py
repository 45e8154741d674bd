"""Operands with which a platform's attention is tried, and how far its numbers are from the definition in float64."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from anytron.kernels.oracles.attention import reference_attention
from anytron.kernels.oracles.influence import IN_PADDING
from anytron.kernels.oracles.masks import PADDING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from anytron.base.traits import AttentionHeads, ModelTraits
    from anytron.kernels.oracles.influence import Attend
    from anytron.sequences.layout import SequenceLayout
    from anytron.sequences.masks import Pair

LENGTHS = (5, 1, 9, 4)
"""Real lengths that no alignment divides."""
TOLERANCE: Mapping[torch.dtype, float] = MappingProxyType({torch.float32: 1e-4, torch.bfloat16: 0.05})
"""Of values and gradients, as a part of the largest one: a thousand roundings of float32, a dozen of bfloat16; a wrong
pair makes far more."""


def drawn_operands(heads: AttentionHeads, dtype: torch.dtype) -> list[Tensor]:
    """Draw queries, keys and values ``[T, H, D]`` of sequences of :data:`LENGTHS`, on the host; the same everywhere."""
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
    """Compare outputs and gradients of this rank's real tokens with float64, each as a part of the largest value.

    Args:
        attend: The attention, within the scope of its micro-batch; it reads ``sinks`` by itself.
        operands: Those of :func:`drawn_operands`.
        layout: Of this rank, on the device.
        scale: Factor of the scores.
        traits: ``causal`` and ``window`` count.
        sinks: ``[H]`` logits that join the softmax's denominator, a leaf on the device.

    Returns:
        Infinity if a gradient is missing, or a number is not finite: in the output, padding counts too.
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
    if not output.requires_grad or not bool(output.isfinite().all()):
        return float("inf")
    output = output.masked_fill(padding, 0.0)
    found = torch.autograd.grad(output.float().square().sum(), (*leaves, *own), allow_unused=True)
    largest = 0.0
    for value, want in ((output.detach(), wanted.detach()), *zip(found, gradients, strict=True)):
        if value is None or not bool(value.isfinite().all()):
            return float("inf")
        expected = want.to(device, torch.float32)
        expected = expected if expected.dim() == 1 else layout.pack(expected)
        largest = max(largest, float((value.float() - expected).abs().max() / want.abs().max()))
    return largest


def described(wrong: set[Pair]) -> str:
    """Say of pairs that are let through or hidden wrongly how many there are, and which is the first."""
    if not wrong:
        return "attends as defined"
    query, key = min(wrong)
    other = "padding" if key == PADDING else str(key)
    return f"has {len(wrong)} wrong pairs of tokens, such as {query} and {other}"
