"""RMS norm in one kernel, for elements of 16 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from anytron.kernels import fused as neutral

if TYPE_CHECKING:
    from torch import Tensor


def liger_rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """As :func:`anytron.kernels.fused.rms_norm`, and in its order of casts.

    ``LigerRMSNormFunction`` (``liger_kernel/ops/rms_norm.py``) has both orders: ``llama`` casts to the input's type
    and then multiplies, ``gemma`` computes all in float32. By default it writes the input's gradient over the
    output's, which another layer may hold.
    """
    from liger_kernel.ops import LigerRMSNormFunction

    if x.dtype != weight.dtype:  # its result has the type of x, not of both
        return neutral.rms_norm(x, weight, eps, zero_centered)
    offset, casts, in_place = (1.0, "gemma", False) if zero_centered else (0.0, "llama", False)
    normalised: Tensor = LigerRMSNormFunction.apply(x, weight, eps, offset, casts, in_place)
    return normalised


def torch_rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """As :func:`anytron.kernels.fused.rms_norm`, cast once instead of twice: the product is taken in float32, too.

    torch has one kernel for an input and a weight of one type; the factor ``1 + weight`` needs another type.
    """
    if zero_centered or x.dtype != weight.dtype:
        return neutral.rms_norm(x, weight, eps, zero_centered)
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)
