"""Load the head of a sequence classifier on tensor-parallel ranks, each of which has all of it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def keep_whole(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap the method that cuts a rank's part out of a tensor: fill up only what is cut."""

    @functools.wraps(original)
    def _split_tp(self: Any, hf_weight: Tensor, tp_dim: int | None, is_expert: bool, is_embedding: bool) -> Tensor:
        return original(self, hf_weight, tp_dim, is_expert, is_embedding=is_embedding and tp_dim is not None)

    return _split_tp
