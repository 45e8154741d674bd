"""Fixes of DeepSeek sparse attention: the rotation of the indexer's queries and keys."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def hadamard_transform(x: Tensor) -> Tensor:
    """Multiply by the normalised Hadamard matrix of Sylvester's construction, in ``log2(D)`` rounds of sums.

    The matrix is orthogonal and symmetric: dot products of two transformed vectors are those of the vectors, and the
    transform is its own inverse. Entry (i, j) is ``(-1)^n / sqrt(D)`` for n bits that are set in both i and j.

    Args:
        x: Floating point ``[..., D]``, D a power of two. bfloat16 and float16 are computed in float32 and rounded once.

    Returns:
        The product, of the same shape and element type.

    Raises:
        ValueError: D is not a power of two.
    """
    width = x.shape[-1]
    if width == 0 or width & (width - 1):
        raise ValueError(f"a Hadamard transform has a power of two of entries, not {width}")
    sums = x.to(torch.promote_types(x.dtype, torch.float32))
    step = 1
    while step < width:
        first, second = sums.unflatten(-1, (-1, 2, step)).unbind(-2)
        sums = torch.stack((first + second, first - second), -2).flatten(-3)
        step *= 2
    transformed: Tensor = sums * width**-0.5
    return transformed.to(x.dtype)


def rotate_in_torch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``rotate_activation`` of ``dsa.py``: any device and element type, without a CUDA extension."""

    @functools.wraps(original)
    def rotate_activation(x: Tensor) -> Tensor:
        return hadamard_transform(x)

    return rotate_activation
