"""Soft overlong punishment: the nearer a response comes to the longest possible one, the less it is worth."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def overlong_penalties(lengths: Tensor, longest: int, buffer: int) -> Tensor:
    """Punish length linearly within the last tokens before the limit (DAPO, arXiv:2503.14476, eq. 13).

    With ``b`` tokens of buffer before the limit ``L`` a response of ``l`` tokens gets::

        0                  where l <= L - b
        (L - b - l) / b    where L - b < l <= L
        -1                 where L < l

    Args:
        lengths: int64 ``[N]``, tokens of each response.
        longest: ``L``, the limit, in tokens.
        buffer: ``b``, in tokens, from 1 to ``L``.

    Returns:
        float32 ``[N]``, from -1 to 0.
    """
    return ((longest - buffer - lengths) / buffer).clamp(-1.0, 0.0)
