"""Share the rotary key of multi-latent attention between tensor-parallel ranks whose sequences are whole."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from anytron_megatron.patches.shadow import shadowed

if TYPE_CHECKING:
    from collections.abc import Callable

GATHER = "gather_from_sequence_parallel_region"
"""The name under which the class's module holds the collective that it calls."""


def share_whole_sequences(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap mcore-bridge's ``MLASelfAttention.get_query_key_value_tensors``.

    All heads share one rotary key, ``[S, B, D]``. It gathers this key over the sequence with any tensor parallelism,
    although each rank has whole sequences unless ``sequence_parallel`` is set. Then the key is passed on as it is, and
    its gradient is summed over the ranks, as each rank has a part of the heads that it serves (Megatron-LM #6839).
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
