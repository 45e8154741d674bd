"""Mamba-2 layers of Megatron's hybrid models, computed with the platform's kernels instead of the package mamba-ssm."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from anytron.device.patches import Installed
from anytron.kernels.contract import KernelName, KernelSpec
from anytron.sequences.masks import current_mask
from anytron.sequences.planning import inverted, zigzag_order

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from megatron.core.packed_seq_params import PackedSeqParams

    from anytron.device.hooks.types import PatchContext


class GroupNorm(nn.Module):
    """Normalise each group of a layer's channels by its root mean square, as ``RMSNorm`` of mamba-ssm without a gate.

    The order of operations is that of ``NemotronHRMSNormGated`` in Hugging Face: the normalised input is cast to the
    input's type and then multiplied by the weight.

    Args:
        hidden_size: Channels of this rank.
        eps: Added to the mean square.
        group_size: Channels of a group.
        norm_before_gate: False: Megatron applies the gate before the norm.
        device: Device of the weight.
        dtype: Element type of the weight.
    """

    tp_group: torch.distributed.ProcessGroup

    def __init__(
        self,
        hidden_size: int,
        *,
        eps: float,
        group_size: int,
        norm_before_gate: bool,
        device: int | torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        assert not norm_before_gate  # as in the constructor of MambaMixer
        self.eps = eps
        self.group_size = group_size
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[..., hidden_size]``, in float32."""
        groups = x.float().unflatten(-1, (-1, self.group_size))
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        scaled: Tensor = self.weight * normed.flatten(-2).to(x.dtype)
        return scaled

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describe the weight for distributed checkpoints: split over tensor-parallel ranks."""
        from megatron.core.transformer.utils import (
            ensure_metadata_has_dp_cp_group,
            make_sharded_tensors_for_checkpoint,
        )

        described: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )
        return described


def install_kernels(context: PatchContext) -> Installed:
    """Make Megatron's Mamba layers compute with the platform's kernels.

    Without the package mamba-ssm the constructor refuses, and the norm's class is a ``MagicMock``. With it, the layer
    reads where packed sequences begin from ``PackedSeqParams.seq_idx``, which is None unless the caller knows the
    length of the buffer: sequences would see their neighbours. And it asks Transformer Engine for the order of packed
    sequences on context-parallel ranks.
    """
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer

    spec = KernelSpec(context.platform.runtime().device_type)
    convolve = context.kernels.fused_kernel(KernelName.CAUSAL_CONV1D, spec)
    scan = context.kernels.fused_kernel(KernelName.STATE_SPACE_SCAN, spec)

    def compute(layer: Any, projected: Tensor, packed_seq_params: PackedSeqParams | None = None) -> Tensor:
        return compute_layer(layer, projected, packed_seq_params, convolve, scan)

    undo = mamba_context_parallel._undo_attention_load_balancing
    redo = mamba_context_parallel._redo_attention_load_balancing
    with ExitStack() as stack:
        for owner, name, value in (
            (mamba_mixer, "HAVE_MAMBA_SSM", True),
            (mamba_mixer, "ExtendedRMSNorm", GroupNorm),
            (mamba_mixer.MambaMixer, "_ssm_training", compute),
            (mamba_context_parallel, "_undo_attention_load_balancing", in_order(undo)),
            (mamba_context_parallel, "_redo_attention_load_balancing", as_shards(redo)),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        return Installed(stack.pop_all().close)


def compute_layer(
    layer: Any,
    projected: Tensor,
    packed_seq_params: PackedSeqParams | None,
    convolve: Callable[..., Tensor],
    scan: Callable[..., Tensor],
) -> Tensor:
    """Stand in for ``MambaMixer._ssm_training``: convolution, recurrence, gate and norm.

    Padding of rows is zero, but the convolution adds its bias, and SiLU of that would enter the state: it is set to
    zero again. Packed sequences need no mask: kernels start anew at each sequence, whose padding comes last.

    Args:
        layer: A ``MambaMixer``.
        projected: ``[S, B, D]``, this rank's heads over whole sequences: gate, x, b, c and dt.
        packed_seq_params: Where packed sequences begin; None = each column is a sequence.
        convolve: Kernel of the convolution.
        scan: Kernel of the recurrence.

    Returns:
        ``[S / cp, B, heads * P]``, with context parallelism all heads of this rank's tokens.
    """
    split = layer.cp
    channels, states = split.d_inner_local_tpcp, split.ngroups_local_tpcp * layer.d_state
    parts = [channels, channels + 2 * states, split.nheads_local_tpcp]
    gate, mixed, dt = projected.transpose(0, 1).split(parts, dim=-1)
    starts = None if packed_seq_params is None else _starts(packed_seq_params)

    weight, bias = split.get_conv1d_weight()[:, 0], split.get_conv1d_bias()
    mixed = convolve(mixed, weight, bias, True, starts)
    if starts is None:
        mixed = mixed.masked_fill(_padding(), 0)
    x, b, c = mixed.split([channels, states, states], dim=-1)
    answers = scan(
        x.unflatten(-1, (-1, layer.headdim)),
        softplus(dt.float() + split.get_dt_bias().float()),
        -split.get_A_log().float().exp(),
        b.unflatten(-1, (-1, layer.d_state)),
        c.unflatten(-1, (-1, layer.d_state)),
        split.get_D().float(),
        starts,
    )
    gated = (answers.flatten(-2).float() * silu(gate.float())).to(projected.dtype)
    whole = split.post_conv_ssm(gated.transpose(0, 1).contiguous(), packed_seq_params)
    normed: Tensor = layer.norm(whole)
    return normed


def _padding() -> Tensor:
    """Mark padding of whole rows: bool ``[B, S, 1]``, True = MASKED.

    The patch ``megatron.mamba-padding`` has checked that the micro-batch has the map, of the layer's shape.
    """
    mask = current_mask()
    assert mask is not None
    assert mask.linear_attn_mask is not None
    return ~mask.linear_attn_mask[..., None]


def _starts(packed_seq_params: PackedSeqParams) -> Tensor:
    """Offsets of the packed sequences in the buffer of all ranks, int32 ``[B + 1]``."""
    padded = packed_seq_params.cu_seqlens_q_padded
    starts: Tensor = packed_seq_params.cu_seqlens_q if padded is None else padded
    return starts


def in_order(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``_undo_attention_load_balancing``: rows of all ranks -> tokens in order, also of packed sequences."""

    def undo(rows: Tensor, cp_size: int, packed_seq_params: PackedSeqParams | None = None) -> Tensor:
        if packed_seq_params is None:
            return original(rows, cp_size)
        return rows.index_select(0, inverted(_order(rows, cp_size, packed_seq_params)))

    return undo


def as_shards(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``_redo_attention_load_balancing``: the inverse of :func:`in_order`."""

    def redo(rows: Tensor, cp_size: int, packed_seq_params: PackedSeqParams | None = None) -> Tensor:
        if packed_seq_params is None:
            return original(rows, cp_size)
        return rows.index_select(0, _order(rows, cp_size, packed_seq_params))

    return redo


def _order(rows: Tensor, cp_size: int, packed_seq_params: PackedSeqParams) -> Tensor:
    return zigzag_order(_starts(packed_seq_params).long().diff(), cp_size, len(rows))
