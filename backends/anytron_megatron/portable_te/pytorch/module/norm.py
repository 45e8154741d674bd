"""Layer norm and RMS norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from anytron.base.errors import EngineError
from anytron.kernels.contract import KernelName
from anytron_megatron.portable_te.binding import kernels
from anytron_megatron.portable_te.refusals import refuse_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    Norm = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def norm_kernel(normalization: str, dtype: torch.dtype, eps: float, zero_centered: bool) -> Norm:
    """Get the platform's kernel as a function of (x, weight, bias).

    Raises:
        EngineError: The normalization is neither ``LayerNorm`` nor ``RMSNorm``.
    """
    if normalization == "RMSNorm":
        rms_norm = kernels().fused(KernelName.RMS_NORM, dtype, eps=eps, zero_centered=zero_centered)
        return lambda x, weight, _bias: rms_norm(x, weight, eps, zero_centered)
    if normalization == "LayerNorm":
        layer_norm = kernels().fused(KernelName.LAYER_NORM, dtype, eps=eps, zero_centered=zero_centered)
        return lambda x, weight, bias: layer_norm(x, weight, bias, eps, zero_centered)
    raise EngineError(
        f"Unknown normalization {normalization!r}.",
        where="transformer_engine.pytorch",
        fix="use LayerNorm or RMSNorm",
    )


class _Norm(torch.nn.Module):
    """A norm over the last dimension.

    Args:
        sequence_parallel: Whether each rank sees a part of the sequence, so that Megatron must sum their gradients;
            None = no.
        zero_centered_gamma: Whether the factor is ``1 + weight``; False = it is ``weight``.
        hidden_size: The older name of ``normalized_shape``, which Megatron uses before 0.17.

    Raises:
        EngineError: A setting is not supported.
    """

    normalization: ClassVar[str]

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: Any = None,
        **unsupported: Any,
    ) -> None:
        super().__init__()
        refuse_settings(type(self).__name__, unsupported)
        size = hidden_size if normalized_shape is None else normalized_shape
        if size is None:
            raise TypeError(f"{type(self).__name__} needs normalized_shape (or hidden_size, its older name)")
        self.eps = eps
        dtype = params_dtype or torch.get_default_dtype()
        self.weight = torch.nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        vars(self.weight)["sequence_parallel"] = bool(sequence_parallel)
        self.bias: torch.nn.Parameter | None = None
        if self.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.empty(size, dtype=dtype, device=device))
            vars(self.bias)["sequence_parallel"] = bool(sequence_parallel)
        self.zero_centered_gamma = zero_centered_gamma
        self.reset_parameters()

    @property
    def zero_centered_gamma(self) -> bool:
        """Whether the factor is ``1 + weight``; may be set later, as mcore-bridge does for Gated DeltaNet."""
        return self._zero_centered_gamma

    @zero_centered_gamma.setter
    def zero_centered_gamma(self, value: bool) -> None:
        self._zero_centered_gamma = value
        self._norm = norm_kernel(self.normalization, self.weight.dtype, self.eps, value)

    def reset_parameters(self, **unsupported: Any) -> None:
        """Make the factor one and the bias zero.

        Raises:
            EngineError: A setting is not supported.
        """
        refuse_settings(f"{type(self).__name__}.reset_parameters", unsupported)
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``[..., hidden_size]``."""
        return self._norm(input, self.weight, self.bias)


class LayerNorm(_Norm):
    """Layer normalization: by mean and standard deviation."""

    normalization = "LayerNorm"


class RMSNorm(_Norm):
    """Root mean square normalization."""

    normalization = "RMSNorm"
