"""Operations that Megatron composes: the activation. The composer itself is refused."""

from __future__ import annotations

import torch
from torch import Tensor

from anytron.hooks.types import KernelName
from anytron_megatron.portable_te.binding import kernels
from anytron_megatron.portable_te.refusals import refuse, refuse_settings


class FusibleOperation(torch.nn.Module):
    """Base of operations; Megatron names it in annotations."""


class SwiGLU(FusibleOperation):
    """``silu(a) * b`` for the halves a, b of the last dimension (``use_te_activation_func``)."""

    def __init__(self, **settings: object) -> None:
        super().__init__()
        refuse_settings("ops.SwiGLU", settings)
        self._swiglu = kernels().fused(KernelName.SWIGLU, None)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., 2 N]`` -> ``[..., N]``."""
        output: Tensor = self._swiglu(x)
        return output


class Sequential(FusibleOperation):
    """Operations that are fused with each other (``use_transformer_engine_op_fuser``)."""

    def __init__(self, *_operations: FusibleOperation) -> None:
        refuse("ops.Sequential", "operation fuser", "set use_transformer_engine_op_fuser to false")
