"""Leave padding out of routing statistics: auxiliary losses, and the token counts behind expert biases."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from anytron.base.errors import EngineError
from anytron.sequences.masks import current_mask

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def mask_padding(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``TopKRouter.forward(self, input, padding_mask=None)``.

    The mask is the current micro-batch's, whatever the layers above have passed.
    """

    @functools.wraps(original)
    def forward(self: Any, input: Tensor, padding_mask: Tensor | None = None, **more: Any) -> Any:
        mask = current_mask()
        if mask is not None and mask.padding_mask is not None:
            padding_mask = _of_this_rank(mask.padding_mask, self, input)
        return original(self, input, padding_mask, **more)

    return forward


def _of_this_rank(padding_mask: Tensor, router: Any, hidden: Tensor) -> Tensor:
    """Arrange a mask ``[R, C]`` of this context-parallel rank as a router's input: bool ``[S, B]``, True = MASKED."""
    mask = padding_mask.t()
    if router.config.sequence_parallel:
        mask = mask.chunk(router.tp_group.size())[router.tp_group.rank()]
    if mask.shape != hidden.shape[:2]:
        raise EngineError(
            "The router's tokens are not the tokens of the micro-batch.",
            where="padding mask of mixture-of-experts routing",
            why=f"the mask is {tuple(mask.shape)}, the hidden states {tuple(hidden.shape[:2])} (sequence, batch)",
        )
    return mask
