"""What Transformer Engine shares between frameworks: the names of quantisation recipes."""

from anytron_megatron.portable_te.common import recipe

__all__ = ["recipe"]
