"""Leave the rotary key of latent attention as it is where no rank has only a part of the sequence."""

from __future__ import annotations

import functools
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def keep_whole_rotary_key(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_query_key_value_tensors`` of mcore-bridge's ``MLASelfAttention``.

    All heads share one rotary key, ``[T, B, D]`` (``[T / TP, B, D]`` with sequence parallelism). mcore-bridge gathers
    it along T whenever TP is above 1. Without sequence parallelism the ranks have all of T already: the key stays, and
    the backward pass sums its gradient over the ranks, each of which has that of its own heads only.
    """
    assert isinstance(original, FunctionType)

    @functools.wraps(original)
    def get_query_key_value_tensors(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.config.sequence_parallel:
            return original(self, *arguments, **options)
        return _without_gathering(original)(self, *arguments, **options)

    return get_query_key_value_tensors


def _without_gathering(original: FunctionType) -> FunctionType:
    """The same function with one name bound anew; made at each call, as other patches change the module's names."""
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

    names = {**original.__globals__, "gather_from_sequence_parallel_region": copy_to_tensor_model_parallel_region}
    copied = FunctionType(original.__code__, names, None, original.__defaults__, original.__closure__)
    copied.__kwdefaults__ = original.__kwdefaults__
    return copied
