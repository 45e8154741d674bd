"""Keep transformers' global table of rotary embeddings as it is."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def keep_table(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that changes ``ROPE_INIT_FUNCTIONS``: restore the table after each call."""

    @functools.wraps(original)
    def get_rope_inv_freq(*args: Any, **kwargs: Any) -> Any:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        before = dict(ROPE_INIT_FUNCTIONS)
        try:
            return original(*args, **kwargs)
        finally:
            ROPE_INIT_FUNCTIONS.clear()
            ROPE_INIT_FUNCTIONS.update(before)

    return get_rope_inv_freq
