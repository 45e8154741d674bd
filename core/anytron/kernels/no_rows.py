"""The answer of a kernel that has nothing to compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def zeros_from(shape: Sequence[int], first: Tensor, *others: Tensor | None) -> Tensor:
    """Zeros that depend on operands: each of them gets a gradient of zeros, where plain zeros would give it none.

    A rank whose output depends on nothing leaves the backward pass, and with it the collectives there, in which the
    other ranks wait for it for ever.

    Args:
        shape: Of the answer.
        first: Has the answer's element type and device.
        others: The other operands; None is left out.
    """
    zeros = first.new_zeros(tuple(shape))
    for operand in (first, *others):
        if operand is not None:
            zeros = zeros + operand.flatten()[:0].sum()  # not 0 times a number, which may be NaN
    return zeros
