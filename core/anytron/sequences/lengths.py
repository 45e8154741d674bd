"""Check the lengths of a ragged batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anytron.base.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence


def checked_lengths(lengths: Sequence[int] | Tensor, context_length: int | None = None) -> Tensor:
    """Check lengths: at least one sequence, none empty, none longer than the model's context.

    Args:
        lengths: Real lengths; a sequence of ints or an int tensor ``[B]``. One on a device is copied
            to the host, once: the only synchronisation that a layout costs.
        context_length: The longest sequence that the model reads; None = no limit.

    Returns:
        int64 ``[B]`` on the host.

    Raises:
        DataError: Another shape, no integers, a length below 1 or above ``context_length``.
    """
    real = lengths.cpu() if isinstance(lengths, Tensor) else torch.tensor(lengths)
    if real.ndim != 1 or real.numel() == 0:
        raise DataError("A layout needs at least one sequence.", where="lengths", why=f"shape {tuple(real.shape)}")
    if real.dtype.is_floating_point or real.dtype.is_complex or real.dtype is torch.bool:
        raise DataError("Lengths must be integers.", where="lengths", why=f"dtype {real.dtype}")
    real = real.to(torch.int64)
    shortest, longest = (int(end) for end in real.aminmax())
    if shortest < 1:
        index = int(real.argmin())
        raise DataError("A sequence has no tokens.", where="lengths", why=f"sequence {index} has length {shortest}")
    if context_length is not None and longest > context_length:
        index = int(real.argmax())
        raise DataError(
            "A sequence is longer than the model's context.",
            where="lengths",
            why=f"sequence {index} has length {longest}, the context {context_length}",
            fix="use shorter prompts, or lower rollout.max_new_tokens",
        )
    return real
