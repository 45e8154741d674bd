"""Compute attention with the platform's kernel and the platform's mask, and compare with the definition in float64.

Which tokens attend to which is found out by influence: one key and its value are changed after the other, and the
outputs that move see it. So no kernel mode has to be known by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from anytron.hooks.types import LayoutRequest
from anytron.kernels.contract import AttentionCall
from anytron.masks import MaskKind, MaskRequest, Polarity, scope_of
from anytron.reference.attention import reference_attention
from anytron.reference.influence import IN_PADDING, influence
from anytron.reference.masks import PADDING, defined_pairs
from anytron.sequences import LayoutConstraints, ModelInputs, plan_layout, scopes

if TYPE_CHECKING:
    from torch import Tensor

    from anytron.doctor.bench import Bench
    from anytron.kernels.contract import AttentionKernel, AttentionSpec
    from anytron.masks import AttnMask, Pair
    from anytron.reference.influence import Attend
    from anytron.sequences import SequenceLayout
    from anytron.sequences.layout import Format


LENGTHS = (5, 1, 9, 4)
"""Real lengths that no alignment divides."""
GAPS = LayoutConstraints(align=4)
"""Padding between sequences, so that real and padded offsets differ."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Of values and gradients, as a part of the largest one: many roundings, and far less than a wrong pair makes."""


def probe_attention(bench: Bench, sequence_format: Format) -> dict[str, Any]:
    """Compute on the device.

    Returns:
        ``difference`` and ``tolerance``, ``wrong`` (pairs of tokens that are let through or hidden wrongly, counted),
        ``detail``, ``supplier`` of the kernel and ``mask_from``.
    """
    hooks, spec, device = bench.session.hooks, bench.attention, bench.runtime.current_device()
    constraints = hooks.layout_constraints(LayoutRequest(sequence_format, bench.traits, bench.sizes)).merge(GAPS)
    layout = plan_layout(LENGTHS, format=sequence_format, constraints=constraints).to(device)
    accepted = {MaskKind.NONE} if sequence_format == "thd" else {MaskKind.NONE, MaskKind.FULL_4D}
    request = MaskRequest(sequence_format, bench.traits, bench.sizes, frozenset(accepted))
    built = hooks.build_attn_mask(request)
    tokens = torch.zeros(layout.num_tokens, dtype=torch.int64, device=device)
    inputs = ModelInputs(
        layout=layout,
        input_ids=layout.pack(tokens),
        position_ids=layout.position_ids,
        labels=layout.next_tokens(tokens),
        extra={},
    )
    inputs = hooks.preprocess_sequences(inputs)
    request = MaskRequest(sequence_format, bench.traits, bench.sizes, frozenset(accepted), inputs.layout)
    mask = hooks.build_attn_mask(request, built)
    kernel = hooks.attention_kernel(spec)
    operands = _operands(spec, bench.dtype)
    with scopes.enter(scopes.combine(inputs.scope, scope_of(mask))):
        attend = _attend(kernel, _call(mask, layout), layout)
        found = influence(attend, operands, layout, device)
        difference = _difference(attend, operands, spec, layout, device)
    bench.runtime.synchronize()
    wrong = found ^ defined_pairs(LENGTHS, bench.traits)
    heads = f"{spec.num_heads}/{spec.num_kv_heads} heads of {spec.qk_dim}/{spec.v_dim}, {bench.dtype}"
    return {
        "difference": difference,
        "tolerance": TOLERANCE.get(bench.dtype, 0.05),
        "wrong": len(wrong),
        "detail": f"{sequence_format} '{mask.kernel_mode}', {heads}{_first(wrong)}",
        "supplier": hooks.suppliers()["attention_kernel"],
        "mask_from": mask.plugin,
    }


def _call(mask: AttnMask, layout: SequenceLayout) -> AttentionCall:
    if layout.format == "bshd":
        tensor = mask.read_as(Polarity.MASKED)
        return AttentionCall("bshd", mask.kernel_mode, mask=tensor, mode_from=mask.plugin)
    real, padded, longest = layout.cu_seqlens, layout.cu_seqlens_padded, layout.max_seqlen
    return AttentionCall("thd", mask.kernel_mode, real, real, padded, padded, longest, longest, mode_from=mask.plugin)


def _attend(kernel: AttentionKernel, call: AttentionCall, layout: SequenceLayout) -> Attend:
    """The kernel on operands as they lie in the layout: ``[R, C, H, D]`` -> ``[R, C, H, Dv]``."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if layout.format == "bshd":
            return kernel(query, key, value, call)
        return kernel(query[0], key[0], value[0], call)[None]

    return attend


def _operands(spec: AttentionSpec, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values ``[T, H, D]`` on the host, in the element type of the run."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((spec.num_heads, spec.qk_dim), (spec.num_kv_heads, spec.qk_dim), (spec.num_kv_heads, spec.v_dim))
    return [torch.randn(sum(LENGTHS), *shape, generator=generator).to(dtype) for shape in shapes]


def _difference(
    attend: Attend, operands: list[Tensor], spec: AttentionSpec, layout: SequenceLayout, device: torch.device
) -> float:
    """The largest difference to float64 of outputs and gradients, each as a part of the largest value."""
    exact = [operand.double().requires_grad_() for operand in operands]
    wanted = reference_attention(*exact, lengths=LENGTHS, scale=spec.scale)
    gradients = torch.autograd.grad(wanted.square().sum(), exact)
    real = layout.valid[..., None, None]
    leaves = [layout.pack(operand.to(device), IN_PADDING).requires_grad_() for operand in operands]
    output = attend(*leaves).masked_fill(~real, 0.0)
    if not output.requires_grad:
        return float("inf")
    found = torch.autograd.grad(output.float().square().sum(), leaves, allow_unused=True)
    largest = 0.0
    for value, want in ((output.detach(), wanted.detach()), *zip(found, gradients, strict=True)):
        if value is None or not bool(value.isfinite().all()):
            return float("inf")
        expected = layout.pack(want.to(device, torch.float32))
        largest = max(largest, float((value.float() - expected).abs().max() / expected.abs().max()))
    return largest


def _first(wrong: set[Pair]) -> str:
    if not wrong:
        return ""
    query, key = min(wrong)
    other = "padding" if key == PADDING else f"token {key}"
    return f"; {len(wrong)} pairs are wrong, the first: token {query} and {other}"
