"""``npu_rms_norm`` and its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron_ascend_simulator.kernels.contract import require

if TYPE_CHECKING:
    from torch import Tensor


def _rms_norm(x: Tensor, gamma: Tensor, epsilon: float, y: Tensor, rstd: Tensor) -> None:
    """``y = x * rstd * gamma`` with ``rstd = 1 / sqrt(mean(x^2) + epsilon)`` over gamma's dimensions."""
    _check(x, gamma)
    axes = _axes(gamma)
    inverse = torch.rsqrt(x.float().square().mean(axes, keepdim=True) + epsilon)
    y.copy_(x.float() * inverse * gamma.float())
    rstd.copy_(inverse.view_as(rstd))


def _rms_norm_grad(dy: Tensor, x: Tensor, rstd: Tensor, gamma: Tensor, dx: Tensor, dgamma: Tensor) -> None:
    """The gradient from the *given* ``rstd``, as the operator does it (it has no epsilon)."""
    _check(x, gamma)
    require(dy.shape == x.shape, f"dy {tuple(dy.shape)} and x {tuple(x.shape)} differ in shape")
    axes = _axes(gamma)
    wide, inverse = x.float(), rstd.float()
    normalised = wide * inverse
    scaled = dy.float() * gamma.float()
    dx.copy_(inverse * (scaled - normalised * (scaled * normalised).mean(axes, keepdim=True)))
    leading = tuple(range(x.dim() - gamma.dim()))
    dgamma.copy_((dy.float() * normalised).sum(leading) if leading else dy.float() * normalised)


def _check(x: Tensor, gamma: Tensor) -> None:
    require(
        x.shape[x.dim() - gamma.dim() :] == gamma.shape,
        f"gamma {tuple(gamma.shape)} is not the end of x's shape {tuple(x.shape)}",
    )


def _axes(gamma: Tensor) -> tuple[int, ...]:
    return tuple(range(-gamma.dim(), 0))


KERNELS = {"aclnnRmsNorm": _rms_norm, "aclnnRmsNormGrad": _rms_norm_grad}
