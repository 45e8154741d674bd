"""Rotary embeddings for every position that a cache of keys holds, not for the tokens of a step."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def tell_context(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``GPTModel._preprocess``: ``_get_rotary_pos_emb``, which it calls, is told the inference context."""

    @functools.wraps(original)
    def _preprocess(self: Any, *args: Any, inference_context: Any = None, **kwargs: Any) -> Any:
        if inference_context is None:
            return original(self, *args, **kwargs)
        told = functools.partial(self._get_rotary_pos_emb, inference_context=inference_context)
        self._get_rotary_pos_emb = told
        try:
            return original(self, *args, inference_context=inference_context, **kwargs)
        finally:
            del self._get_rotary_pos_emb

    return _preprocess
