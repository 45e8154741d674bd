"""Fixes of multi-latent attention: packed sequences, narrow values, and its queries and rotary keys."""

from __future__ import annotations

import functools
import inspect
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor


VALUE_WIDTH = "hidden_size_per_attention_head_v"
"""Attribute in which Transformer Engine's and MindSpeed's attention modules keep the width that values must have."""

GATHER = "gather_from_sequence_parallel_region"
"""The name under which the class's module holds the collective that it calls."""


def pad_values(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``MultiLatentAttention.forward``: pad packed values for kernels that need them as wide as queries and keys.

    DeepSeek's heads are 192 wide for queries and keys (128 + 64 of rotary embedding) and 128 for values.
    Transformer Engine's packed kernels of several versions, and MindSpeed's TND kernel, refuse that.
    Megatron pads values itself from 0.16.2 on (Megatron-LM #3003, ``_run_core_attention``). The method differs from
    version to version. Two places are the same in all versions, and only these are changed here: the call of the core
    attention and its recomputation.

    This wrapper pads values with zeros to the queries' width and cuts the output back. It does so only for packed
    sequences, if there are values (absorbed decoding has none), if they are narrower, and if no experimental attention
    variant is configured. Recomputed core attention does the same; there the DSA variant also receives two extra
    inputs, which Megatron 0.16 passes only without recomputation.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        packed = signature.bind(self, *args, **kwargs).arguments.get("packed_seq_params")
        # The attribute is as new as the variants: Megatron 0.16.
        variant = getattr(self.config, "experimental_attention_variant", None)
        pads = packed is not None and packed.qkv_format == "thd" and variant is None
        if not pads and variant != "dsa":
            return original(self, *args, **kwargs)
        with ExitStack() as touched:
            core = self.core_attention
            attend = _padded(core) if pads else core.forward
            extra: dict[str, Tensor] = {}
            if variant == "dsa":
                touched.enter_context(shadowed(self, "get_query_key_value_tensors", _keeping(self, extra)))
            touched.enter_context(shadowed(core, "forward", attend))
            touched.enter_context(shadowed(self, "_checkpointed_attention_forward", _recomputed(self, attend, extra)))
            return original(self, *args, **kwargs)

    return forward


def _padded(core: Any) -> Callable[..., Any]:
    """Make core attention accept values that are narrower than queries."""
    inner = core.forward

    def attend(query: Tensor, key: Tensor, value: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        """Take ``[T, N, D]``, ``[T, N, D]`` and ``[T, N, Dv]``; give ``[T, N, Dv]`` if Dv < D."""
        if value is None or value.shape[-1] >= query.shape[-1]:
            return inner(query, key, value, *args, **kwargs)
        wide, narrow = query.shape[-1], value.shape[-1]
        with shadowed(core, VALUE_WIDTH, wide) if hasattr(core, VALUE_WIDTH) else ExitStack():
            output = inner(query, key, functional.pad(value, (0, wide - narrow)), *args, **kwargs)
        if output.ndim == 2:  # Transformer Engine gives [T, N * D], MindSpeed [T, N, D]
            output = output.unflatten(-1, (-1, wide))
        return output[..., :narrow]

    return attend


def _recomputed(attention: Any, attend: Callable[..., Any], extra: dict[str, Tensor]) -> Callable[..., Any]:
    """Replace ``Attention._checkpointed_attention_forward``: use ``attend`` also in the recomputation."""
    core = attention.core_attention

    def checkpointed(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Any:
        from megatron.core.tensor_parallel import checkpoint

        del rotary_pos_emb  # multi-latent attention has applied it already
        names = list(extra)

        def run(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *more: Tensor) -> Any:
            with shadowed(core, "forward", attend):
                return core(
                    query,
                    key,
                    value,
                    mask,
                    attn_mask_type=attn_mask_type or attention.attn_mask_type,
                    attention_bias=attention_bias,
                    packed_seq_params=packed_seq_params,
                    **dict(zip(names, more, strict=True)),
                )

        # Inputs that need gradients are arguments: recomputation detaches arguments, not what a closure holds.
        return checkpoint(run, False, query, key, value, attention_mask, *extra.values())

    return checkpointed


def _keeping(attention: Any, extra: dict[str, Tensor]) -> Callable[..., Any]:
    """Wrap ``get_query_key_value_tensors``: keep the two extra inputs of DSA's core attention, ``x`` and ``qr``."""
    inner = attention.get_query_key_value_tensors

    def get_query_key_value_tensors(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = inner(hidden_states, *args, **kwargs)
        extra.update(x=hidden_states, qr=answer[3])  # query, key, value, compressed query, compressed key and value
        return answer

    return get_query_key_value_tensors


def drop_batch_dimension(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_query_key_value_tensors``: return ``[T, N, D]`` for packed sequences, not ``[T, 1, N, D]``.

    Hidden states of a packed batch are ``[T, 1, H]``. From 0.13 on, Megatron drops the middle dimension before the up
    projection (multi_latent_attention.py of 0.13.0, "If sequence packing, TE expect [t, h, d] shaped qkv input"). 0.12
    keeps it, so that rotary embeddings broadcast over it and the kernel receives four dimensions.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_query_key_value_tensors(*args: Any, **kwargs: Any) -> Any:
        packed = signature.bind(*args, **kwargs).arguments.get("packed_seq_params")
        answer = original(*args, **kwargs)
        if packed is None or packed.qkv_format != "thd":
            return answer
        return tuple(tensor.squeeze(1) for tensor in answer)

    return get_query_key_value_tensors


def rotate_without_batch_dimension(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_apply_rotary_pos_emb_thd``: rotate ``[T, 1, N, D]`` as it does ``[T, N, D]``."""

    @functools.wraps(original)
    def _apply_rotary_pos_emb_thd(t: Tensor, *args: Any, **kwargs: Any) -> Any:
        if t.ndim != 4:
            return original(t, *args, **kwargs)
        return original(t.squeeze(1), *args, **kwargs).unsqueeze(1)

    return _apply_rotary_pos_emb_thd


def rotate_at_padded_positions(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_query_key_value_tensors``: pass where padded sequences start, as Megatron does from 0.14 on."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_query_key_value_tensors(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        packed = bound.arguments.get("packed_seq_params")
        if packed is not None and packed.cu_seqlens_q_padded is not None:
            bound.arguments["packed_seq_params"] = replace(
                packed, cu_seqlens_q=packed.cu_seqlens_q_padded, cu_seqlens_kv=packed.cu_seqlens_kv_padded
            )
        return original(*bound.args, **bound.kwargs)

    return get_query_key_value_tensors


_ABSENT = object()


@contextmanager
def shadowed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of the instance inside the block, and restore it afterwards.

    It bypasses ``__setattr__``, because ``torch.nn.Module``'s would register modules and parameters.
    """
    own = vars(owner)
    before = own.get(name, _ABSENT)
    own[name] = value
    try:
        yield
    finally:
        if before is _ABSENT:
            del own[name]
        else:
            own[name] = before


def keep_query_projection(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``QKNormConfigResolver._mla_fused_linear_or_default``: project uncompressed queries without a norm.

    DeepSeek normalises the compressed form of queries (``q_a_layernorm``). If ``q_lora_rank`` is None, queries are not
    compressed and have no norm, and the layer specs name a projection without a norm; but megatron-core 0.19 uses a
    projection with a norm.
    """

    @functools.wraps(original)
    def _mla_fused_linear_or_default(self: Any, module_spec: Any, module_name: str) -> Any:
        if module_name == "linear_q_proj":
            return module_spec or self.linear_impl
        return original(self, module_spec, module_name)

    return _mla_fused_linear_or_default


def share_whole_sequences(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap mcore-bridge's ``get_query_key_value_tensors``: share the rotary key between ranks with whole sequences.

    All heads share one rotary key, ``[S, B, D]``. The original gathers this key over the sequence with any tensor
    parallelism, although each rank has whole sequences unless ``sequence_parallel`` is set. Then the key is passed on
    as it is, and its gradient is summed over the ranks, because each rank has only some of the heads that use the key
    (Megatron-LM #6839).
    """
    module = sys.modules[original.__module__]

    @functools.wraps(original)
    def get_query_key_value_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.config.sequence_parallel:
            return original(self, *args, **kwargs)
        from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

        with shadowed(module, GATHER, copy_to_tensor_model_parallel_region):
            return original(self, *args, **kwargs)

    return get_query_key_value_tensors
