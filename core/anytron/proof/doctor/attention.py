"""Compute attention with the platform's kernel and the platform's mask, and compare with the definition in float64.

Which tokens attend to which is found out by influence: one key and its value are changed after the other, and the
outputs that move see it. So no kernel mode has to be known by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from anytron.base.traits import AttentionHeads
from anytron.device.platform import LayoutRequest, layout_constraints_of
from anytron.kernels.contract import AttentionCall
from anytron.kernels.oracles.attention import LENGTHS, TOLERANCE, described, drawn_operands, largest_difference
from anytron.kernels.oracles.influence import influence
from anytron.kernels.oracles.masks import defined_pairs
from anytron.sequences import scopes
from anytron.sequences.layout import LayoutConstraints, ModelInputs
from anytron.sequences.masks import MaskKind, MaskRequest, Polarity, scope_of
from anytron.sequences.planning import plan_layout

if TYPE_CHECKING:
    from torch import Tensor

    from anytron.kernels.contract import AttentionKernel
    from anytron.kernels.oracles.influence import Attend
    from anytron.proof.doctor.bench import Bench
    from anytron.sequences.layout import Format, SequenceLayout
    from anytron.sequences.masks import AttnMask


GAPS = LayoutConstraints(align=4)
"""Padding between sequences, so that real and padded offsets differ."""


def probe_attention(bench: Bench, sequence_format: Format, *, windowed: bool = False) -> dict[str, Any]:
    """Compute on the device, as a layer of the model does: one with a sliding window, or one without.

    Returns:
        ``difference`` and ``tolerance``, ``wrong`` (pairs of tokens that are let through or hidden wrongly, counted),
        ``detail``, ``supplier`` of the kernel and ``mask_from``.
    """
    hooks, spec, device = bench.session.hooks, bench.attention(windowed=windowed), bench.runtime.current_device()
    wanted = LayoutRequest(sequence_format, bench.traits, bench.sizes)
    constraints = layout_constraints_of(bench.session.platform, wanted).merge(GAPS)
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
    sinks = torch.linspace(-1, 2, spec.num_heads).to(device, bench.dtype).requires_grad_() if spec.sinks else None
    operands = drawn_operands(AttentionHeads(spec.num_heads, spec.num_kv_heads, spec.qk_dim, spec.v_dim), bench.dtype)
    with scopes.enter(scopes.combine(inputs.scope, scope_of(mask))):
        attend = _attend(kernel, replace(_call(mask, layout), sinks=sinks), layout)
        found = influence(attend, operands, layout, device)
        difference = largest_difference(attend, operands, layout, scale=spec.scale, traits=spec.traits, sinks=sinks)
    bench.runtime.synchronize()
    wrong = found ^ defined_pairs(LENGTHS, spec.traits)
    layer = f"{spec.num_heads}/{spec.num_kv_heads} heads of {spec.qk_dim}/{spec.v_dim}, {bench.dtype}"
    layer += f", a window of {spec.traits.window[0] + 1} tokens" if spec.traits.window else ""
    return {
        "difference": difference,
        "tolerance": TOLERANCE[bench.dtype],
        "wrong": len(wrong),
        "detail": f"{sequence_format} '{mask.kernel_mode}' {described(wrong)}, {layer}{', sinks' * spec.sinks}",
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
