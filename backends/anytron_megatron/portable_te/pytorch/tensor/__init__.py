"""Quantised tensors."""


class QuantizedTensor:
    """A class for Megatron's ``isinstance`` checks; it is never instantiated."""
