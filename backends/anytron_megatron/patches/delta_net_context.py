"""Let context-parallel ranks share Gated DeltaNet by its heads.

A rank holds two chunks of each sequence (:class:`anytron.sequences.ContextShard`), but the convolution and the
recurrence need whole ones. So the ranks exchange what the first projection computed: each gives away all heads of its
tokens but its own, and gets its own heads of all tokens. After the recurrence they exchange back. A rank computes with
its heads' part of the convolution's weights, of ``A_log`` and of ``dt_bias``. The rest of their gradients is zero on
it, and the sum over context-parallel ranks, which every gradient goes through, is the whole one.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from anytron.device.patches import Installed
from anytron.sequences.planning import inverted, zigzag_order

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from anytron.device.hooks.types import PatchContext


class Packed(NamedTuple):
    """Packed sequences in one piece: ``rows``, ``[T, 1, D]``, and int ``[B + 1]``, where in them sequences begin."""

    rows: Tensor
    cu_seqlens: Tensor


def install_exchange(_context: PatchContext) -> Installed:
    """Give mcore-bridge's layer the functions that it imports from later versions of Megatron.

    It calls them once for each packed sequence; here ``_unpack_sequence``, which would cut a buffer for that, leaves
    it in one piece, and one exchange moves all of it.
    """
    from mcore_bridge.model.modules import gated_delta_net as bridge
    from megatron.core.ssm import gated_delta_net as megatron

    # No property: an adaptor may put in a constructor that sets the attribute by itself.
    context_size = cached_property(lambda layer: layer.pg_collection.cp.size())
    context_size.__set_name__(bridge.GatedDeltaNet, "cp_size")
    with ExitStack() as stack:
        stack.callback(setattr, bridge, "_unpack_sequence", bridge._unpack_sequence)
        bridge._unpack_sequence = in_one_piece
        for owner, name, value in (
            (megatron, "tensor_a2a_cp2hp", sequences_to_heads),
            (megatron, "tensor_a2a_hp2cp", heads_to_sequences),
            (bridge.GatedDeltaNet, "cp_size", context_size),
        ):
            setattr(owner, name, value)
            stack.callback(delattr, owner, name)
        return Installed(stack.pop_all().close)


def in_one_piece(x: Tensor, cu_seqlens: Tensor, dim: int) -> list[Packed]:
    """Stand in for ``_unpack_sequence``: the sequences lie one after the other along dimension 0."""
    del dim
    return [Packed(x, cu_seqlens)]


def sequences_to_heads(tensor: Tensor | Packed, seq_dim: int, head_dim: int, cp_group: ProcessGroup) -> Tensor:
    """Stand in for ``tensor_a2a_cp2hp``: ``[S / cp, B, D]``, or packed rows -> ``[S, B, D / cp]``, in order."""
    del seq_dim, head_dim
    size = cp_group.size()
    if isinstance(tensor, Packed):
        rows, padded = tensor.rows, tensor.cu_seqlens.long().diff() * size
    else:
        rows, padded = tensor, _one_sequence(tensor, tensor.shape[0] * size)
    order = zigzag_order(padded, size, rows.shape[0] * size)
    exchanged: Tensor = _SequencesToHeads.apply(rows, cp_group, order)  # type: ignore[no-untyped-call]
    return exchanged


def heads_to_sequences(tensor: Tensor | Packed, seq_dim: int, head_dim: int, cp_group: ProcessGroup) -> Tensor:
    """Stand in for ``tensor_a2a_hp2cp``: ``[S, B, D / cp]``, in order -> ``[S / cp, B, D]``, or packed rows."""
    del seq_dim, head_dim
    if isinstance(tensor, Packed):
        rows, padded = tensor.rows, tensor.cu_seqlens.long().diff()
    else:
        rows, padded = tensor, _one_sequence(tensor, tensor.shape[0])
    order = zigzag_order(padded, cp_group.size(), rows.shape[0])
    exchanged: Tensor = _HeadsToSequences.apply(rows, cp_group, order)  # type: ignore[no-untyped-call]
    return exchanged


def _one_sequence(rows: Tensor, length: int) -> Tensor:
    """Lengths, int64 ``[1]`` on the device of ``rows``, where every column is one sequence: padded rows."""
    return torch.full((1,), length, device=rows.device)


def _to_heads(x: Tensor, group: ProcessGroup, order: Tensor) -> Tensor:
    given = x.unflatten(-1, (group.size(), -1)).movedim(-2, 0).contiguous()
    received = torch.empty_like(given)
    dist.all_to_all_single(received, given, group=group)
    return received.flatten(0, 1).index_select(0, inverted(order))


def _to_sequences(x: Tensor, group: ProcessGroup, order: Tensor) -> Tensor:
    given = x.index_select(0, order).unflatten(0, (group.size(), -1))
    received = torch.empty_like(given)
    dist.all_to_all_single(received, given, group=group)
    return received.movedim(0, -2).flatten(-2)


class _SequencesToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, order: Tensor) -> Tensor:
        ctx.group, ctx.order = group, order
        return _to_heads(x, group, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _to_sequences(grad, ctx.group, ctx.order), None, None


class _HeadsToSequences(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, order: Tensor) -> Tensor:
        ctx.group, ctx.order = group, order
        return _to_sequences(x, group, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _to_heads(grad, ctx.group, ctx.order), None, None
