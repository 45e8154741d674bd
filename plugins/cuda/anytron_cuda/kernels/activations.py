"""SwiGLU in one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def liger_swiglu(x: Tensor) -> Tensor:
    """As :func:`anytron.kernels.fused.swiglu`; keeps the input alone for the backward pass.

    ``LigerFusedGateUpSiLUMulFunction`` (``liger_kernel/ops/swiglu.py``) takes Megatron's order of the halves, in one
    tensor. ``in_place`` would write the gradient over the input, which recomputation may still need.
    """
    from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction

    in_place = False
    gated: Tensor = LigerFusedGateUpSiLUMulFunction.apply(x, in_place)
    return gated
