"""Pad the values of multi-latent attention in thd, for kernels that need them as wide as queries and keys.

DeepSeek's heads are 192 wide for queries and keys (128 + 64 of rotary embedding) and 128 for values.
Transformer Engine's packed kernels of several versions, and MindSpeed's TND kernel, refuse that.
Megatron pads values itself from 0.16.2 on (Megatron-LM #3003, ``_run_core_attention``). For earlier
versions this wraps ``MultiLatentAttention.forward``. Its body differs from version to version; all versions share
two places, the call of the core attention and its recomputation, and only these are changed.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch.nn import functional as F  # noqa: N812 - its usual name

from anytron_megatron.patches.shadow import shadowed

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

VALUE_WIDTH = "hidden_size_per_attention_head_v"
"""Attribute in which Transformer Engine's and MindSpeed's attention modules keep the width that values must have."""


def pad_values(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``MultiLatentAttention.forward``.

    It pads values with zeros to the queries' width and cuts the output back. It does so only for packed
    sequences, where there are values (absorbed decoding has none) and they are narrower, and where no experimental
    attention variant has its own way. Recomputed core attention does the same; there the DSA variant also receives
    two extra inputs, which Megatron 0.16 passes only without recomputation.
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
            output = inner(query, key, F.pad(value, (0, wide - narrow)), *args, **kwargs)
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
