"""The fused MLP, which Megatron does not use; peft tests layers against it."""

from __future__ import annotations

from anytron_megatron.portable_te.pytorch.module.base import TransformerEngineBaseModule
from anytron_megatron.portable_te.refusals import refuse


class LayerNormMLP(TransformerEngineBaseModule):
    """A class to compare with; it cannot be made."""

    def __init__(self, *_args: object, **_settings: object) -> None:
        refuse("LayerNormMLP", "LayerNormMLP", "build the MLP from LayerNormLinear and Linear, as Megatron does")
