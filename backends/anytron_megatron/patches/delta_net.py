"""Fixes of Gated DeltaNet: padding, heads on context-parallel ranks, gradients of norms, and kernels."""

from __future__ import annotations

import functools
import inspect
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from anytron.base.errors import EngineError
from anytron.device.patches import Installed
from anytron.kernels.contract import KernelName, KernelSpec
from anytron.sequences.masks import current_mask
from anytron.sequences.planning import inverted, zigzag_order
from anytron_megatron.models.release import delta_net_modules

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.distributed import ProcessGroup

    from anytron.device.hooks.types import PatchContext


def leave_out_padding(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward of a recurrent layer: set padding of rows to zero before and after, so that it has no gradient.

    Layers of Gated DeltaNet and of Mamba-2 receive no mask. Zeros stay zero in the layer's norm and projections, which
    have no bias. For the convolution they are like the zeros before the start of a sequence. Keys and values of padding
    are 0, so they add nothing to the recurrent state (:mod:`anytron_megatron.patches.mamba` for the convolution's bias
    of Mamba-2). The decay of the state at padding affects no real token: before the first token the state is zero, and
    after the last token nothing reads it. Packed sequences need no mask: kernels start anew at each sequence, whose
    padding comes last.

    Raises:
        EngineError: The layer runs outside of a micro-batch's scope, or the shapes of mask and rows differ.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        given = signature.bind(self, hidden_states, *args, **kwargs).arguments
        if given.get("packed_seq_params") is not None:
            return original(self, hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
        padding = _padding(self, hidden_states)
        # masked_fill, not a product: the gradient is 0 even where padding holds NaN.
        output, bias = original(self, hidden_states.masked_fill(padding, 0), *args, **kwargs)
        return output.masked_fill(padding, 0), bias

    return forward


def _padding(layer: Any, hidden_states: Tensor) -> Tensor:
    """Mark padding among a layer's inputs: bool ``[S, B, 1]``, of this rank's part of ``S``, True = MASKED."""
    mask = current_mask()
    if mask is None or mask.linear_attn_mask is None:
        raise EngineError(
            "A recurrent layer does not know which tokens are padding.",
            where=f"layer {layer.layer_number}",
            why="it runs outside its micro-batch's scope" if mask is None else "the mask has no linear_attn_mask",
            fix="call the model through anytron_megatron.forward(model, prepared), which sets the mask, or train on "
            "packed sequences",
        )
    padding = ~mask.linear_attn_mask.t()
    context, tensor = layer.pg_collection.cp, layer.pg_collection.tp
    parts = tensor.size() if layer.config.sequence_parallel else 1
    rows, columns = hidden_states.shape[:2]
    if padding.shape != (rows * parts * context.size(), columns):
        raise EngineError(
            "The mask of a recurrent layer does not match the shape of its input.",
            where=f"layer {layer.layer_number}",
            why=f"linear_attn_mask has the shape {tuple(mask.linear_attn_mask.shape)} (batch, sequence), but the input "
            f"has {(rows, columns)} (a part of the sequence on each of {parts * context.size()} ranks, batch)",
            fix="call the model through anytron_megatron.forward(model, prepared), which sets the micro-batch's mask",
        )
    if context.size() > 1:
        order = zigzag_order(torch.full((1,), len(padding), device=padding.device), context.size(), len(padding))
        padding = padding.index_select(0, order.chunk(context.size())[context.rank()])
    if parts > 1:
        # With sequence parallelism the ranks hold consecutive parts of these rows.
        padding = padding.chunk(parts)[tensor.rank()]
    return padding[..., None]


def install_exchange(_context: PatchContext) -> Installed:
    """Split Gated DeltaNet by heads between context-parallel ranks, with functions of later versions of Megatron.

    A rank holds two chunks of each sequence (:class:`anytron.sequences.ContextShard`), but the convolution and the
    recurrence need whole ones. So the ranks exchange the outputs of the first projection: each sends the other ranks'
    heads of its tokens, and receives its own heads of all tokens. After the recurrence they exchange back. A rank
    computes with its heads' part of the convolution's weights, of ``A_log`` and of ``dt_bias``. On this rank the rest
    of their gradients is zero, and the sum over context-parallel ranks, which is computed for every gradient, is the
    whole gradient.

    mcore-bridge's layer calls these functions once for each packed sequence, which ``_unpack_sequence`` cuts out of the
    buffer. Here ``_unpack_sequence`` leaves the buffer in one piece, so that one exchange moves all of it.
    """
    from mcore_bridge.model.modules import gated_delta_net as bridge
    from megatron.core.ssm import gated_delta_net as megatron

    # No property: an adaptor may put in a constructor that sets the attribute by itself.
    context_size = functools.cached_property(lambda layer: layer.pg_collection.cp.size())
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


def sum_partial_gradients(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``GatedDeltaNet.__init__``: with tensor parallelism, correct the gradients of two norms' weights.

    A rank computes its heads over whole sequences: with sequence parallelism mcore-bridge gathers them before the
    layer's first norm. Two weights are the same on all ranks, and Megatron handles their gradients wrongly: complete
    gradients as partial ones, or partial gradients as complete ones. The norm inside the first projection sees whole
    sequences, so its gradient is complete on every rank. It is marked ``sequence_parallel``, and Megatron would sum it
    over ranks: tp times too large. The norm of the heads' output sees this rank's heads only. Megatron sums its
    gradient with sequence parallelism; without it each rank keeps its part, which the hook here sums.
    """

    @functools.wraps(original)
    def construct(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        if self.tp_size == 1:
            return
        if config.sequence_parallel:
            first = getattr(self, "in_proj", None)  # split projections have their norm outside
            for name in ("layer_norm_weight", "layer_norm_bias"):
                if (parameter := getattr(first, name, None)) is not None:
                    parameter.sequence_parallel = False
            return
        group = self.pg_collection.tp

        def summed(grad: Tensor) -> Tensor:
            total = grad.clone()
            dist.all_reduce(total, group=group)
            return total

        for parameter in self.out_norm.parameters():
            parameter.register_hook(summed)

    return construct


def install_kernels(context: PatchContext) -> Installed:
    """Make mcore-bridge's Gated DeltaNet use the platform's kernels.

    mcore-bridge calls them by the names and signatures of flash-linear-attention, which are None without that package.
    Its layer inherits the constructor of Megatron's class, which refuses to build without the package, although
    mcore-bridge's forward never calls the functions that the constructor stores.
    """
    from mcore_bridge.model.modules import gated_delta_net as bridge

    from anytron.kernels.gated_delta_rule import l2norm

    constructor, rules = delta_net_modules()
    spec = KernelSpec(context.platform.runtime().device_type)
    convolve = context.kernels.fused_kernel(KernelName.CAUSAL_CONV1D, spec)
    rule = context.kernels.fused_kernel(KernelName.GATED_DELTA_RULE, spec)

    def causal_conv1d(
        x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, None]:
        """Stand in for ``fla.modules.convolution.causal_conv1d`` as the layer calls it; there is no final state."""
        return convolve(x, weight, bias, activation in ("silu", "swish"), cu_seqlens), None

    def chunk_gated_delta_rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None, **unused: Any
    ) -> tuple[Tensor, None]:
        """Stand in for ``fla.ops.gated_delta_rule.chunk_gated_delta_rule`` as the layer calls it; no final state.

        The other arguments say that there is no initial state, that the caller wants no final one, and that
        queries and keys are normalised already.
        """
        wanted = {name: value for name, value in unused.items() if value not in (None, False)}
        if wanted:
            raise EngineError(
                "Anytron's gated delta rule does not support some options of a call.",
                where="chunk_gated_delta_rule",
                why=f"these are set: {', '.join(sorted(wanted))}",
                fix="call it without these options",
            )
        return rule(q, k, v, g, beta, q.shape[-1] ** -0.5, cu_seqlens), None

    with ExitStack() as stack:
        for module, name, value in (
            (constructor, "HAVE_FLA", True),
            (rules, "chunk_gated_delta_rule", chunk_gated_delta_rule),
            (bridge, "l2norm", l2norm),
            (bridge, "causal_conv1d", causal_conv1d),
            (bridge, "chunk_gated_delta_rule", chunk_gated_delta_rule),
        ):
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        return Installed(stack.pop_all().close)


class Packed(NamedTuple):
    """Packed sequences in one tensor: ``rows``, ``[T, 1, D]``; ``cu_seqlens``, int ``[B + 1]``, has their offsets."""

    rows: Tensor
    cu_seqlens: Tensor


def in_one_piece(x: Tensor, cu_seqlens: Tensor, dim: int) -> list[Packed]:
    """Stand in for ``_unpack_sequence``: do not cut; the sequences lie one after the other along dimension 0."""
    del dim
    return [Packed(x, cu_seqlens)]


def sequences_to_heads(tensor: Tensor | Packed, seq_dim: int, head_dim: int, cp_group: ProcessGroup) -> Tensor:
    """Stand in for ``tensor_a2a_cp2hp``: exchange a part of the sequences with all heads for whole sequences.

    Takes ``[S / cp, B, D]``, or packed rows; returns ``[S, B, D / cp]``, tokens in order, this rank's heads.
    """
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
    """Stand in for ``tensor_a2a_hp2cp``: the inverse of :func:`sequences_to_heads`.

    Takes ``[S, B, D / cp]``, with the tokens in order; returns ``[S / cp, B, D]``, or packed rows.
    """
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
