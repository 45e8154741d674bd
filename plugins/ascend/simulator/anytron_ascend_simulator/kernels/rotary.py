"""``npu_rotary_mul`` and its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron_ascend_simulator.kernels.contract import require
from anytron_ascend_simulator.kernels.differentiate import gradients

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

HALF, INTERLEAVED = 0, 1
"""Modes of ``aclnnRotaryPositionEmbedding``."""


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, mode: int) -> Tensor:
    if mode == HALF:
        first, second = x.chunk(2, -1)
        rotated = torch.cat((-second, first), -1)
    else:
        rotated = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cos + rotated * sin


def _check_rotary(x: Tensor, cos: Tensor, sin: Tensor, mode: int) -> None:
    require(mode in (HALF, INTERLEAVED), f"mode {mode}: 0 (half) or 1 (interleaved)")
    require(x.dim() == 4, f"x has {x.dim()} dimensions, not 4")
    require(x.size(-1) % 2 == 0 and x.size(-1) <= 896, f"head size {x.size(-1)}: even, and at most 896")
    require(cos.shape == sin.shape, f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} differ")
    require(cos.size(-1) == x.size(-1), f"cos has head size {cos.size(-1)}, x {x.size(-1)}")
    fits = all(small in (1, large) for small, large in zip(cos.shape, x.shape, strict=True))
    require(fits, f"cos {tuple(cos.shape)} does not broadcast to x {tuple(x.shape)}")


def _rotary(x: Tensor, cos: Tensor, sin: Tensor, mode: int, y: Tensor) -> None:
    _check_rotary(x, cos, sin, mode)
    y.copy_(_rotated(x.float(), cos.float(), sin.float(), mode))


def _rotary_grad(
    dy: Tensor, cos: Tensor, sin: Tensor, x: Tensor | None, mode: int, dx: Tensor, dcos: Tensor, dsin: Tensor
) -> None:
    # Without x only dx is wanted; it does not depend on x.
    given = dy if x is None else x
    _check_rotary(given, cos, sin, mode)
    found = gradients(lambda a, b, c: _rotated(a, b, c, mode), (given, cos, sin), dy)
    dx.copy_(found[0])
    if x is not None:
        dcos.copy_(found[1])
        dsin.copy_(found[2])
