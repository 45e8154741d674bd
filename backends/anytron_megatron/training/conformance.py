"""Hold the platform's attention for the model at hand against its definition."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from anytron.engines.protocol import Conformance
from anytron.kernels.contract import AttentionCall, AttentionSpec
from anytron.reference.attention import reference_attention
from anytron.reference.masks import defined_pairs, read_npu_fusion_attention, read_transformer_engine
from anytron.sequences import ContextShard

if TYPE_CHECKING:
    from anytron.hooks.facade import Hooks
    from anytron.traits import AttentionHeads, ParallelSizes
    from anytron_megatron.training.micro_batch import BatchPreparer

LENGTHS = (5, 1, 9, 4)
"""Real lengths that no alignment divides."""
TOLERANCE = 1e-4
"""Of values around 1 and of gradients around 10, in float32: a thousand roundings."""


def attention_conformance(
    hooks: Hooks,
    preparer: BatchPreparer,
    *,
    heads: AttentionHeads,
    sizes: ParallelSizes,
    device: torch.device,
    kernels: bool,
) -> Conformance:
    """Compare masks pair by pair, and the attention kernel with attention in float64.

    Args:
        hooks: The facade over all plugins.
        preparer: Plans layouts and asks for masks as training does.
        heads: The model's attention.
        sizes: The parallel sizes.
        device: Where kernels run.
        kernels: The model's modules ask the hooks for their kernel; otherwise the vendor's modules have
            kernels of their own, which the other checks cover.
    """
    wrong, reader = _wrong_pairs(preparer, sizes)
    details = [f"mask '{preparer.mask_kind.kernel_mode}' {reader}"]
    difference = float(wrong)
    if kernels:
        spec = AttentionSpec(
            num_heads=heads.heads // sizes.tensor,
            num_kv_heads=max(1, heads.kv_heads // sizes.tensor),
            qk_dim=heads.qk_dim,
            v_dim=heads.v_dim,
            scale=heads.qk_dim**-0.5,
            traits=preparer.traits,
            device_type=device.type,
        )
        difference = max(difference, _kernel_difference(hooks, spec, device))
        details.append(f"kernel with {spec.num_heads}/{spec.num_kv_heads} heads of {spec.qk_dim}/{spec.v_dim}")
    return Conformance(difference, TOLERANCE, "; ".join(details))


def _wrong_pairs(preparer: BatchPreparer, sizes: ParallelSizes) -> tuple[int, str]:
    """Count pairs of tokens that the mask lets through or hides wrongly, as its kernel reads it."""
    lengths = torch.tensor(LENGTHS)
    layouts = [preparer.plan(lengths, ContextShard(sizes.context, rank)) for rank in range(sizes.context)]
    mask = preparer.mask_of(layouts[0])
    if mask.kernel_mode.startswith("sparse_mode"):
        found = read_npu_fusion_attention(mask, layouts)
    else:
        found = read_transformer_engine(mask, layouts, preparer.traits)
    expected = defined_pairs(LENGTHS, preparer.traits)
    return len(found ^ expected), f"read pair by pair ({len(expected)} pairs)"


def _kernel_difference(hooks: Hooks, spec: AttentionSpec, device: torch.device) -> float:
    """The largest difference of packed and padded attention, and of its gradients, to float64."""
    kernel = hooks.attention_kernel(spec)
    total, generator = sum(LENGTHS), torch.Generator().manual_seed(0)
    sizes = ((spec.num_heads, spec.qk_dim), (spec.num_kv_heads, spec.qk_dim), (spec.num_kv_heads, spec.v_dim))
    operands = [torch.randn(total, *size, generator=generator) for size in sizes]

    exact = [operand.double().requires_grad_() for operand in operands]
    traits = spec.traits
    wanted = reference_attention(*exact, lengths=LENGTHS, scale=spec.scale, causal=traits.causal, window=traits.window)
    gradients = torch.autograd.grad(wanted.square().sum(), exact)

    ends = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32, device=device)
    longest = max(LENGTHS)
    call = AttentionCall("thd", traits.causal, ends, ends, ends, ends, longest, longest)
    leaves = [operand.to(device).requires_grad_() for operand in operands]
    output = kernel(*leaves, call)
    found = [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]
    return max(
        float((value.cpu().double() - want.detach()).abs().max())
        for value, want in zip(found, (wanted, *gradients), strict=True)
    )
