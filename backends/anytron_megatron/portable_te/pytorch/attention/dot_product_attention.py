"""The attention module: Transformer Engine's formats and mask types in front of the platform's kernel.

The platform's kernel is called with the platform's mask: within a micro-batch's scope
(:func:`anytron.sequences.masks.current_mask`), the mask that the platform's hook ``build_attn_mask`` returned replaces
the mask type that Megatron passes. This concerns the language model's self-attention, which Megatron calls as causal
self-attention without a mask tensor. Cross-attention, the bidirectional layers of vision towers, and layers with their
own mask use Megatron's mask type.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from anytron.base.errors import EngineError
from anytron.base.traits import ModelTraits
from anytron.kernels.contract import AttentionCall, AttentionSpec
from anytron.sequences.masks import current_mask
from anytron.sequences.shared_prompts import current_prompts
from anytron_megatron.portable_te.binding import kernels
from anytron_megatron.portable_te.pytorch.attention.context_parallel import attend_sharded
from anytron_megatron.portable_te.pytorch.module.base import default_init, rng_state, tensor_parallel_size
from anytron_megatron.portable_te.refusals import refuse, refuse_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup


SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")

MASK_TYPES = (
    "no_mask",
    "causal",
    "causal_bottom_right",
    "padding",
    "padding_causal",
    "padding_causal_bottom_right",
    "arbitrary",
)


class DotProductAttention(torch.nn.Module):
    """Scaled dot-product attention over this rank's heads.

    Accepted without effect, because they change no result: ``sequence_parallel``
    (a rank computes whole sequences for its heads), ``cp_stream`` and ``cp_comm_type`` (how keys
    travel between context-parallel ranks; here they are gathered).

    Args:
        num_attention_heads: Query heads over all tensor-parallel ranks.
        kv_channels: Head size, or a pair: the head size of queries and keys, and the head size of values.
        num_gqa_groups: Key and value heads over all ranks; None = as many as query heads.
        attention_dropout: Dropout of attention weights while training.
        qkv_format: ``sbhd``, ``bshd`` or ``thd``; the default of calls.
        attn_mask_type: One of :data:`MASK_TYPES`; the default of calls.
        window_size: Neighbours (left, right) that a query sees; -1 = all.
        get_rng_state_tracker: Function that returns the tracker whose state dropout uses.
        attention_type: ``self`` or ``cross``.
        softmax_scale: Factor of the scores; None = ``1 / sqrt(head size)``.
        softmax_type: Additional term of the softmax's denominator: nothing (``vanilla``), 1
            (``off-by-one``), or ``exp`` of the parameter ``softmax_offset`` ``[H]`` of this rank's
            heads (``learnable``: the attention sinks of gpt-oss).

    Raises:
        EngineError: A setting is not supported.
    """

    softmax_offset: Tensor | None

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        *,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: ProcessGroup | None = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: ProcessGroup | None = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        **unsupported: Any,
    ) -> None:
        super().__init__()
        refuse_settings("DotProductAttention", unsupported)
        if softmax_type not in SOFTMAX_TYPES:
            refuse("DotProductAttention", f"softmax_type {softmax_type!r}", f"use one of {', '.join(SOFTMAX_TYPES)}")
        del sequence_parallel
        tp_size = tensor_parallel_size(tp_group, tp_size)
        self.softmax_type = softmax_type
        self.qkv_format = qkv_format
        self.attn_mask_type = _known_mask_type(attn_mask_type)
        self.attention_type = attention_type
        self.attention_dropout = attention_dropout
        self.layer_number = layer_number
        causal = "causal" in attn_mask_type
        self._window = _real_window(window_size, causal=causal)
        self.window_size = self._window or ((-1, 0) if causal else (-1, -1))
        self._get_rng_state_tracker = get_rng_state_tracker
        qk_dim, v_dim = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        spec = AttentionSpec(
            num_heads=num_attention_heads // tp_size,
            num_kv_heads=(num_gqa_groups or num_attention_heads) // tp_size,
            qk_dim=qk_dim,
            v_dim=v_dim,
            scale=softmax_scale if softmax_scale is not None else qk_dim**-0.5,
            traits=ModelTraits(
                causal=causal,
                latent_attention=qk_dim != v_dim,
                window=self._window,
            ),
            dropout=attention_dropout,
            sinks=softmax_type != "vanilla",
            device_type=kernels().device_type,
        )
        self._kernel = kernels().attention(spec)
        self._add_softmax_offset(num_attention_heads // tp_size)
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def _add_softmax_offset(self, heads: int) -> None:
        """Make the logit ``[H]`` that each head adds to the softmax: none, zeros (``exp(0) = 1``), or learnt."""
        if self.softmax_type == "vanilla":
            self.softmax_offset = None
            return
        offset = torch.zeros(heads, device=kernels().device_type)
        if self.softmax_type == "off-by-one":
            self.register_buffer("softmax_offset", offset, persistent=False)
            return
        with torch.no_grad(), rng_state(self._get_rng_state_tracker):
            default_init(offset)
        self.softmax_offset = torch.nn.Parameter(offset)
        # Split by heads: without the marks Megatron's gradient norm counts the part of one rank only.
        vars(self.softmax_offset).update(tensor_model_parallel=True, partition_dim=0, partition_stride=1)

    def set_context_parallel_group(
        self,
        cp_group: ProcessGroup | None,
        cp_global_ranks: list[int] | None,
        cp_stream: Any,
        cp_comm_type: str = "p2p",
        **unsupported: Any,
    ) -> None:
        """Set the context-parallel group; None turns context parallelism off.

        Raises:
            EngineError: The group is hierarchical, or a setting is not supported.
        """
        refuse_settings("DotProductAttention.set_context_parallel_group", unsupported)
        del cp_global_ranks, cp_stream
        if isinstance(cp_group, list):
            refuse("DotProductAttention", "hierarchical context parallelism", "set cp_comm_type to p2p")
        self.cp_group = cp_group
        self.cp_comm_type = cp_comm_type

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        *,
        core_attention_bias_type: str = "no_bias",
        fast_zero_fill: bool = True,
        **unsupported: Any,
    ) -> Tensor:
        """Compute the attention of this rank's heads.

        Queries are ``[S, B, H, D]`` (sbhd), ``[B, S, H, D]`` (bshd) or ``[T, H, D]`` (thd). Keys and values have the
        same format, with their own numbers and sizes of heads. ``attention_mask`` is bool, True = MASKED. It is read
        only if the mask type is ``arbitrary`` (broadcastable to ``[B, H, Sq, Sk]``) or a padding type, where it is
        ``[B, 1, 1, Sk]``, True = not a real token. The lengths (``cu_seqlens_...``, ``max_seqlen_...``) are for thd
        only and have the meaning that they have in :class:`~anytron.kernels.contract.AttentionCall`.
        ``fast_zero_fill``, a choice between two ways to write zeros, has no effect.

        Returns:
            ``[S, B, H * Dv]``, ``[B, S, H * Dv]`` or ``[T, H * Dv]``.

        Raises:
            EngineError: A setting is not supported.
        """
        del fast_zero_fill
        if core_attention_bias_type != "no_bias":
            unsupported["core_attention_bias_type"] = core_attention_bias_type
        layout = qkv_format or self.qkv_format
        mask_type = _known_mask_type(attn_mask_type or self.attn_mask_type)
        if window_size is not None and _real_window(window_size, causal="causal" in mask_type) != self._window:
            unsupported["window_size"] = window_size  # the kernel was chosen for the constructor's
        refuse_settings("DotProductAttention.forward", unsupported)
        operands = (query_layer, key_layer, value_layer)
        prompts = current_prompts() if self._is_language_model(mask_type, layout == "thd") else None
        if prompts is not None:
            operands = (query_layer, prompts.keys.take(key_layer), prompts.keys.take(value_layer))
            cu_seqlens_kv = cu_seqlens_kv_padded = prompts.cu_seqlens_keys
        if layout == "sbhd":
            operands = (query_layer.transpose(0, 1), key_layer.transpose(0, 1), value_layer.transpose(0, 1))
        elif layout not in ("bshd", "thd"):
            refuse("DotProductAttention", f"qkv_format {layout}", "use sbhd, bshd or thd")
        elif layout == "thd" and mask_type == "arbitrary":
            refuse("DotProductAttention", "mask type arbitrary for packed sequences", "use padding or padding_causal")
        mode, mask, plugin = self._mode_and_mask(layout, mask_type, attention_mask, operands)
        call = AttentionCall(
            format="thd" if layout == "thd" else "bshd",
            mode=mode,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_kv_padded,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
            mask=mask,
            sinks=self.softmax_offset,
            dropout=self.attention_dropout if self.training else 0.0,
            mode_from=plugin,
        )
        if layout != "thd" and mask_type.endswith("causal") and operands[0].shape[1] != operands[1].shape[1]:
            refuse(
                "DotProductAttention",
                f"mask type {mask_type} with {operands[0].shape[1]} queries and {operands[1].shape[1]} keys",
                f"use {mask_type}_bottom_right",
            )
        with rng_state(self._get_rng_state_tracker) if call.dropout else nullcontext():
            if self.cp_group is not None and dist.get_world_size(self.cp_group) > 1:
                windowed = self._window is not None
                output = attend_sharded(
                    self._kernel, *operands, call, self.cp_group, causal="causal" in mask_type, windowed=windowed
                )
            else:
                output = self._kernel(*operands, call)
        if layout == "sbhd":
            output = output.transpose(0, 1)
        return output.flatten(-2)

    def _mode_and_mask(
        self,
        layout: str,
        mask_type: str,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None,
        operands: Sequence[Tensor],
    ) -> tuple[str, Tensor | None, str]:
        """Return the kernel mode, the mask tensor (True = MASKED), and the name of the plugin that returned both.

        Without a plugin's mask, mode and tensor are those that Megatron passes, and the name is empty.
        """
        packed = layout == "thd"
        answer = current_mask() if self._is_language_model(mask_type, packed) else None
        if answer is None:
            if packed:
                return "padding_causal" if "causal" in mask_type else "padding", None, ""
            # The kernels' causality is aligned to the last query and the last key.
            return mask_type.removesuffix("_bottom_right"), self._mask(attention_mask, mask_type), ""
        query, key, _ = operands
        if answer.tensor is not None and answer.tensor.shape != (query.shape[0], 1, query.shape[1], key.shape[1]):
            raise EngineError(
                "The micro-batch's attention mask does not match this layer.",
                where=f"transformer_engine.pytorch, DotProductAttention of layer {self.layer_number}",
                why=f"the mask is {tuple(answer.tensor.shape)}, queries are {tuple(query.shape)} and keys "
                f"{tuple(key.shape)} (batch, sequence, heads, size)",
                fix="run the model inside the scope of the mask of its micro-batch (anytron.sequences.masks.scope_of)",
            )
        return answer.kernel_mode, answer.tensor, answer.plugin

    def _is_language_model(self, mask_type: str, packed: bool) -> bool:
        """Whether this call is one of causal self-attention whose mask type reads no tensor."""
        return self.attention_type == "self" and (mask_type == "causal" or (packed and mask_type == "padding_causal"))

    def _mask(self, attention_mask: Tensor | tuple[Tensor, Tensor] | None, mask_type: str) -> Tensor | None:
        """Return the mask tensor, True = MASKED; None if the mask type uses no tensor."""
        if mask_type != "arbitrary" and "padding" not in mask_type:
            return None
        if attention_mask is None:
            raise EngineError(
                f"Mask type {mask_type} needs a mask.",
                where=f"transformer_engine.pytorch, DotProductAttention of layer {self.layer_number}",
                why="sequences are padded, and no mask marks the padding",
                fix="pass attention_mask, or use the mask type causal, which is exact if padding is on the right",
            )
        if isinstance(attention_mask, tuple) or (self.attention_type == "cross" and "padding" in mask_type):
            refuse("DotProductAttention", "padded cross attention", "use mask type arbitrary")
        if "padding" in mask_type and attention_mask.shape[-2] == 1:
            # As a query, padding sees nothing either: its output is zero.
            return attention_mask | attention_mask.transpose(-1, -2)
        return attention_mask


def _real_window(window: tuple[int, int] | None, *, causal: bool) -> tuple[int, int] | None:
    """Return the window as Transformer Engine corrects it (``check_set_window_size``); None if it hides nothing.

    A window that is open on one side, which Transformer Engine refuses without causality, is passed on to the kernel.
    """
    if window is None:
        return None
    left, right = window
    if causal:
        return (left, 0) if left >= 0 else None
    return None if left < 0 and right <= 0 else (left, right)


def _known_mask_type(mask_type: str) -> str:
    if mask_type not in MASK_TYPES:
        refuse("DotProductAttention", f"mask type {mask_type!r}", f"use one of {', '.join(MASK_TYPES)}")
    return mask_type


class _SplitAlongDim(torch.autograd.Function):
    """``torch.split`` with contiguous parts; Megatron calls ``apply(x, dim, sizes)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: list[int]) -> tuple[Tensor, ...]:
        ctx.dim = dim
        return tuple(part.contiguous() for part in torch.split(x, sizes, dim))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return torch.cat(grads, ctx.dim), None, None
