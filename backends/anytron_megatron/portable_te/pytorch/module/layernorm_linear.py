"""A norm and the linear layer after it, in one module. ``LayerNormMLP`` exists because peft looks up the name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anytron_megatron.portable_te.pytorch import collectives
from anytron_megatron.portable_te.pytorch.module.base import TransformerEngineBaseModule
from anytron_megatron.portable_te.pytorch.module.linear import Linear
from anytron_megatron.portable_te.pytorch.module.norm import norm_kernel
from anytron_megatron.portable_te.refusals import refuse, refuse_settings


class LayerNormLinear(Linear):
    """``Linear(norm(x))``; the norm works on this rank's part of the sequence. Other arguments as in :class:`Linear`.

    Args:
        normalization: ``LayerNorm`` or ``RMSNorm``.
        zero_centered_gamma: Whether the norm's factor is ``1 + weight``; False = it is ``weight``.
        return_layernorm_output: Whether :meth:`forward` also returns the norm's output; mcore-bridge's LoRA sets this
            attribute.
        return_layernorm_output_gathered: Whether that output is for the whole sequence, not this rank's part.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        params_dtype: torch.dtype | None = None,
        device: Any = None,
        **linear: Any,
    ) -> None:
        super().__init__(in_features, out_features, params_dtype=params_dtype, device=device, **linear)
        self.eps = eps
        self.normalization = normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        size, dtype = (self.in_features,), params_dtype or torch.get_default_dtype()
        self.layer_norm_weight = torch.nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.layer_norm_bias: torch.nn.Parameter | None = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self._norm = norm_kernel(normalization, dtype, eps, zero_centered_gamma)
        self.reset_layer_norm_parameters()
        for parameter in (self.layer_norm_weight, self.layer_norm_bias):
            if parameter is not None:
                # Each rank sees a part of the sequence, so that Megatron must add the gradients.
                vars(parameter)["sequence_parallel"] = self.sequence_parallel

    def reset_layer_norm_parameters(self) -> None:
        """Make the norm's factor one and its bias zero."""
        torch.nn.init.constant_(self.layer_norm_weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.layer_norm_bias is not None:
            torch.nn.init.zeros_(self.layer_norm_bias)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, **unsupported: Any) -> Any:
        """Apply the norm and the linear layer to this rank's input, ``[S, ..., in_features]``.

        Returns:
            The output; or a tuple of the output, the bias if ``return_bias``, and the norm's output if
            ``return_layernorm_output``.

        Raises:
            EngineError: A setting is not supported.
        """
        refuse_settings("LayerNormLinear.forward", unsupported)
        del is_first_microbatch
        normalized = self._norm(inp, self.layer_norm_weight, self.layer_norm_bias)
        output = self._multiply(normalized)
        results = (output, self.bias) if self.return_bias else (output,)
        if self.return_layernorm_output:
            if self.return_layernorm_output_gathered and self.sequence_parallel:
                normalized = collectives.gather_first(normalized, self.tp_group)
            results = (*results, normalized)
        return results if len(results) > 1 else output


class LayerNormMLP(TransformerEngineBaseModule):
    """A class for ``isinstance`` checks; it cannot be instantiated."""

    def __init__(self, *_args: object, **_settings: object) -> None:
        refuse("LayerNormMLP", "LayerNormMLP", "build the MLP from LayerNormLinear and Linear, as Megatron does")


class TransformerLayer(TransformerEngineBaseModule):
    """A class for ``isinstance`` checks; it cannot be instantiated."""

    def __init__(self, *_args: object, **_settings: object) -> None:
        refuse("TransformerLayer", "TransformerLayer", "build the layer from Megatron's TransformerLayer")
