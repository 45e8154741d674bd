"""Attention and rotary embeddings."""

from anytron_megatron.portable_te.pytorch.attention import rope
from anytron_megatron.portable_te.pytorch.attention.dot_product_attention import DotProductAttention
from anytron_megatron.portable_te.pytorch.attention.rope import apply_rotary_pos_emb
from anytron_megatron.portable_te.pytorch.attention.split import _SplitAlongDim

__all__ = ["DotProductAttention", "_SplitAlongDim", "apply_rotary_pos_emb", "rope"]
