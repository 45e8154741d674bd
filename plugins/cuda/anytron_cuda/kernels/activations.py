"""SwiGLU in one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def liger_swiglu(x: Tensor) -> Tensor:
    """As :func:`anytron.kernels.fused.swiglu`; keeps the input alone for the backward pass.

    ``LigerFusedGateUpSiLUMulFunction`` (``liger_kernel/ops/swiglu.py``) takes Megatron's order of the halves, in one
    tensor. Its gradient is a matrix whatever the shape of its input (0.8.5, ``swiglu_fused_gate_up_backward``), so it
    is given one. ``in_place`` would write the gradient over the input, which recomputation may still need.
    """
    from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction

    in_place = False
    size = x.shape[-1]
    gated: Tensor = LigerFusedGateUpSiLUMulFunction.apply(x.reshape(-1, size), in_place)
    return gated.view(*x.shape[:-1], size // 2)
