"""Attention and rotary embeddings."""

from anytron_megatron.portable_te.pytorch.attention import rope
from anytron_megatron.portable_te.pytorch.attention.dot_product_attention import DotProductAttention, _SplitAlongDim
from anytron_megatron.portable_te.pytorch.attention.rope import apply_rotary_pos_emb

__all__ = ["DotProductAttention", "_SplitAlongDim", "apply_rotary_pos_emb", "rope"]
