"""Replacements for the modules of ``transformer_engine.pytorch``."""

from anytron_megatron.portable_te.pytorch import (
    attention,
    distributed,
    fp8,
    module,
    ops,
    optimizers,
    permutation,
    router,
    tensor,
)
from anytron_megatron.portable_te.pytorch.attention import DotProductAttention
from anytron_megatron.portable_te.pytorch.distributed import CudaRNGStatesTracker, checkpoint
from anytron_megatron.portable_te.pytorch.fp8 import Fp8Padding, Fp8Unpadding, fp8_autocast, fp8_model_init
from anytron_megatron.portable_te.pytorch.module import (
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RMSNorm,
    TransformerLayer,
)

__all__ = [
    "CudaRNGStatesTracker",
    "DotProductAttention",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
    "TransformerLayer",
    "attention",
    "checkpoint",
    "distributed",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "module",
    "ops",
    "optimizers",
    "permutation",
    "router",
    "tensor",
]
