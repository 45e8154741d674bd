"""Keep the projection of queries that are not compressed without a norm of its own."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def keep_query_projection(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``QKNormConfigResolver._mla_fused_linear_or_default``.

    DeepSeek's norm of queries is that of their compressed form (``q_a_layernorm``). Where ``q_lora_rank`` is None there
    is none, and the layer specs name a projection without one; megatron-core 0.19 takes one with a norm instead.
    """

    @functools.wraps(original)
    def _mla_fused_linear_or_default(self: Any, module_spec: Any, module_name: str) -> Any:
        if module_name == "linear_q_proj":
            return module_spec or self.linear_impl
        return original(self, module_spec, module_name)

    return _mla_fused_linear_or_default
