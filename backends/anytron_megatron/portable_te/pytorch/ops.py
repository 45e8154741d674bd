"""Operations that Megatron composes: the activation. The composer itself is refused."""

from __future__ import annotations

import torch
from torch import Tensor

from anytron.kernels.contract import KernelName
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

    def sharded_state_dict(self, *_place: object, **_named: object) -> dict[str, object]:
        """Return nothing. Megatron calls it on each module of an MLP to save a checkpoint (``transformer/mlp.py``)."""
        return {}


class _Unfused(FusibleOperation):
    """An activation that Megatron names (0.14: when it is imported) and this package does not compute."""

    def __init__(self, **_settings: object) -> None:
        refuse(f"ops.{type(self).__name__}", "such operation", "set use_te_activation_func to false")


class GELU(_Unfused):
    """``gelu(x)``."""


class GEGLU(_Unfused):
    """``gelu(a) * b``."""


class ReLU(_Unfused):
    """``relu(x)``."""


class ReGLU(_Unfused):
    """``relu(a) * b``."""


class SiLU(_Unfused):
    """``silu(x)``."""


class Sequential(FusibleOperation):
    """Operations that are fused with each other (``use_transformer_engine_op_fuser``)."""

    def __init__(self, *_operations: FusibleOperation) -> None:
        refuse("ops.Sequential", "operation fuser", "set use_transformer_engine_op_fuser to false")
