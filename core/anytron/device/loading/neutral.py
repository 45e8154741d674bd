"""The neutral default: an ordinary plugin that is asked last and handles every device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from anytron.base.errors import HookContractError
from anytron.device.hooks.specs import hookimpl
from anytron.sequences.masks import AttnMask, MaskKind, MaskRequest, Polarity

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from anytron.kernels.contract import (
        AttentionKernel,
        AttentionSpec,
        KernelName,
        KernelSpec,
        LogProbKernel,
        LogProbSpec,
    )
    from anytron.sequences.layout import SequenceLayout


class NeutralDefaults:
    """The hooks implemented in plain torch: correct on every device, tuned for none."""

    name: ClassVar[str] = "neutral-default"

    @hookimpl
    def build_attn_mask(self, request: MaskRequest) -> AttnMask:
        """Return the cheapest form that is exact and that the model accepts.

        The first choice is no tensor, if attention is exact without one: in thd the kernel reads ``cu_seqlens``, and in
        bshd with padding on the right, plain causal attention is exact for real tokens. The second is a 2-D map of real
        tokens, for models that pack or mask by it. A full 4-D mask is built only if the model accepts nothing else.

        Raises:
            HookContractError: No accepted form is exact.
        """
        kind = _neutral_kind(request)
        mode = _kernel_mode(kind, request)
        layout = request.layout
        if layout is None:
            return AttnMask(kind, mode)
        linear = request.traits.linear_attention
        real = real_token_map(layout) if linear or kind is MaskKind.PADDING_2D else None
        tensor: Tensor | None = None
        polarity: Polarity | None = None
        if kind is MaskKind.PADDING_2D:
            tensor, polarity = real, Polarity.KEEP
        elif kind is MaskKind.FULL_4D:
            tensor, polarity = _full_mask(layout, request), Polarity.MASKED
        return AttnMask(
            kind=kind,
            kernel_mode=mode,
            tensor=tensor,
            polarity=polarity,
            padding_mask=~layout.valid if request.traits.mixture_of_experts else None,
            linear_attn_mask=real if linear else None,
        )

    @hookimpl
    def postprocess_output(self, values: Tensor, layout: SequenceLayout) -> Tensor:
        """Unpack ``values`` by the layout; with context parallelism, gather them over ``layout.shard.group``."""
        from anytron.sequences.layout import gather_slots

        group = layout.shard.group
        return layout.unpack(values, gather_slots(group) if group is not None else None)

    @hookimpl
    def attention_kernel(self, spec: AttentionSpec) -> AttentionKernel:
        """The reference attention of :mod:`anytron.kernels.attention`."""
        from anytron.kernels.attention import make_attention

        return make_attention(spec)

    @hookimpl
    def fused_kernel(self, name: KernelName, spec: KernelSpec) -> Callable[..., Any]:
        """The reference kernels of :mod:`anytron.kernels.fused`."""
        from anytron.kernels.fused import default_kernel

        return default_kernel(name, spec)

    @hookimpl
    def log_prob_kernel(self, spec: LogProbSpec) -> LogProbKernel:
        """The chunked, vocabulary-parallel kernel of :mod:`anytron.kernels.log_prob`."""
        from anytron.kernels.log_prob import make_log_prob

        return make_log_prob(spec)


def real_token_map(layout: SequenceLayout) -> Tensor:
    """Mark real tokens: bool ``[B, S]`` on the layout's device, True = KEEP, over all context-parallel shards.

    ``S`` is the longest real length in thd (the input of models that pack inside, as verl does
    for vision models) and the padded row length in bshd.
    """
    import torch

    columns = layout.longest if layout.format == "thd" else layout.max_seqlen
    positions = torch.arange(columns, device=layout.cu_seqlens.device)
    return positions[None] < layout.cu_seqlens.diff()[:, None]


def _neutral_kind(request: MaskRequest) -> MaskKind:
    """The kind for a request; depends on traits, format, parallel sizes and accepted kinds only."""
    packed, causal, context = request.format == "thd", request.traits.causal, request.parallel.context
    exact: list[MaskKind] = []
    # In right-padded rows causality hides the padding. Without it a real row would see padded keys.
    if packed or causal:
        exact.append(MaskKind.NONE)
    # Ring attention knows the padding of packed sequences (cu_seqlens), not of rows.
    if packed or causal or context == 1:
        exact.append(MaskKind.PADDING_2D)
    # A full mask is for attention that has all keys; ring attention takes none.
    if not packed and context == 1:
        exact.append(MaskKind.FULL_4D)
    for kind in exact:
        if kind in request.accepted:
            return kind
    raise HookContractError(
        "Anytron's default build_attn_mask cannot build a mask that this model accepts.",
        where=f"build_attn_mask, {request.format}, context-parallel size {request.parallel.context}, "
        f"{'causal' if request.traits.causal else 'not causal'}",
        why=f"kinds of masks that describe this attention: {', '.join(kind.value for kind in exact) or 'none'}; "
        f"kinds that the model accepts: {', '.join(sorted(kind.value for kind in request.accepted)) or 'none'}",
        fix=f"set engine.sequence_format={'bshd' if packed else 'thd'}, or use a platform whose plugin implements "
        "build_attn_mask",
    )


def _kernel_mode(kind: MaskKind, request: MaskRequest) -> str:
    """Transformer Engine's ``attn_mask_type`` for a kind."""
    if kind is MaskKind.FULL_4D:
        return "arbitrary"
    if request.format == "bshd" and request.traits.causal:
        return "causal"
    return "padding_causal" if request.traits.causal else "padding"


def _full_mask(layout: SequenceLayout, request: MaskRequest) -> Tensor:
    """Mark forbidden pairs: bool ``[B, 1, S, S]``, True = MASKED.

    Forbidden are later keys (causal), keys out of the window, and padding, both as row and as column.
    """
    query, key = layout.position_ids[:, :, None], layout.position_ids[:, None, :]
    keep = layout.valid[:, :, None] & layout.valid[:, None, :]
    if request.traits.causal:
        keep = keep & (key <= query)
    if request.traits.window is not None:
        left, right = request.traits.window
        keep = keep & (key >= query - left) if left >= 0 else keep
        keep = keep & (key <= query + right) if right >= 0 else keep
    return ~keep[:, None]
