"""Layers with Transformer Engine's names, arguments and parameter names."""

from anytron_megatron.portable_te.pytorch.module import base
from anytron_megatron.portable_te.pytorch.module.layernorm_linear import (
    LayerNormLinear,
    LayerNormMLP,
    TransformerLayer,
)
from anytron_megatron.portable_te.pytorch.module.linear import GroupedLinear, Linear
from anytron_megatron.portable_te.pytorch.module.norm import LayerNorm, RMSNorm

__all__ = [
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
    "TransformerLayer",
    "base",
]
