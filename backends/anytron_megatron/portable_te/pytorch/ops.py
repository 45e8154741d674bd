"""Operations of Transformer Engine that Megatron names: SwiGLU works, the others cannot be instantiated."""

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

    def forward(self, input: Tensor) -> Tensor:
        """Compute the activation ``[..., N]`` of ``input``, ``[..., 2 N]``."""
        output: Tensor = self._swiglu(input)
        return output

    def sharded_state_dict(self, *_place: object, **_named: object) -> dict[str, object]:
        """Return an empty dictionary: there is nothing to save (called by Megatron's ``transformer/mlp.py``)."""
        return {}


class _Unfused(FusibleOperation):
    """An activation that Megatron names (0.14: when it is imported) and this package does not compute."""

    def __init__(self, **_settings: object) -> None:
        refuse(f"ops.{type(self).__name__}", f"operation {type(self).__name__}", "set use_te_activation_func to false")


class GELU(_Unfused):
    """``gelu(x)``; cannot be instantiated."""


class GEGLU(_Unfused):
    """``gelu(a) * b``; cannot be instantiated."""


class ReLU(_Unfused):
    """``relu(x)``; cannot be instantiated."""


class ReGLU(_Unfused):
    """``relu(a) * b``; cannot be instantiated."""


class SiLU(_Unfused):
    """``silu(x)``; cannot be instantiated."""


class Sequential(FusibleOperation):
    """The fuser of operations (``use_transformer_engine_op_fuser``); cannot be instantiated."""

    def __init__(self, *_operations: FusibleOperation) -> None:
        refuse("ops.Sequential", "operation fuser", "set use_transformer_engine_op_fuser to false")
