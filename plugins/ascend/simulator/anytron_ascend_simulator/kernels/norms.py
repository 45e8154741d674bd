"""``npu_rms_norm`` and its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron_ascend_simulator.kernels.contract import require

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def _rms_norm(x: Tensor, gamma: Tensor, epsilon: float, y: Tensor, rstd: Tensor) -> None:
    """``y = x * rstd * gamma`` with ``rstd = 1 / sqrt(mean(x^2) + epsilon)`` over gamma's dimensions."""
    axes = _axes(x, gamma)
    inverse = torch.rsqrt(x.float().square().mean(axes, keepdim=True) + epsilon)
    y.copy_(x.float() * inverse * gamma.float())
    rstd.copy_(inverse.view_as(rstd))


def _rms_norm_grad(dy: Tensor, x: Tensor, rstd: Tensor, gamma: Tensor, dx: Tensor, dgamma: Tensor) -> None:
    """The gradient from the *given* ``rstd``, as the operator does it (it has no epsilon)."""
    axes = _axes(x, gamma)
    require(dy.shape == x.shape, f"dy {tuple(dy.shape)} and x {tuple(x.shape)} differ in shape")
    wide, inverse = x.float(), rstd.float()
    normalised = wide * inverse
    scaled = dy.float() * gamma.float()
    dx.copy_(inverse * (scaled - normalised * (scaled * normalised).mean(axes, keepdim=True)))
    dgamma.copy_((dy.float() * normalised).sum_to_size(gamma.shape))


def _axes(x: Tensor, gamma: Tensor) -> tuple[int, ...]:
    """The dimensions of ``x`` that ``gamma`` has."""
    require(
        x.shape[x.dim() - gamma.dim() :] == gamma.shape,
        f"gamma {tuple(gamma.shape)} is not the end of x's shape {tuple(x.shape)}",
    )
    return tuple(range(-gamma.dim(), 0))
