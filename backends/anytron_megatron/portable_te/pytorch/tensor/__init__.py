"""Quantised tensors."""


class QuantizedTensor:
    """What Megatron tests parameters against; none is ever made."""
