"""The class of quantised tensors, which are not supported."""


class QuantizedTensor:
    """A class for Megatron's ``isinstance`` checks; it is never instantiated."""
