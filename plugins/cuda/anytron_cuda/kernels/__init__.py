"""Fused kernels with the signatures of :mod:`anytron.kernels.fused`, from libraries if these are installed."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from anytron.kernels import KernelName
from anytron.kernels.fused import default_kernel
from anytron_cuda.capabilities import NEUTRAL, DescribedKernel, capabilities
from anytron_cuda.kernels.choice import FLASH_ATTN, LIGER, TORCH, choose_kernel
from anytron_cuda.kernels.implementations import (
    flash_attn_rope,
    liger_rms_norm,
    liger_swiglu,
    torch_adam,
    torch_grouped_mm,
    torch_rms_norm,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from anytron.kernels import KernelSpec

IMPLEMENTATIONS: Mapping[tuple[KernelName, str], Callable[..., Any]] = MappingProxyType(
    {
        (KernelName.RMS_NORM, LIGER): liger_rms_norm,
        (KernelName.RMS_NORM, TORCH): torch_rms_norm,
        (KernelName.SWIGLU, LIGER): liger_swiglu,
        (KernelName.ROPE, FLASH_ATTN): flash_attn_rope,
        (KernelName.GROUPED_MM, TORCH): torch_grouped_mm,
        (KernelName.ADAM, TORCH): torch_adam,
    }
)


def fused_kernel(name: KernelName, spec: KernelSpec) -> DescribedKernel | None:
    """Supply a kernel for this GPU; None for another kind of device, and where kernels must be company-invariant."""
    if spec.device_type != "cuda" or spec.invariant:
        return None
    choice = choose_kernel(capabilities(), name, spec)
    kernel = default_kernel(name, spec) if choice.kernel == NEUTRAL else IMPLEMENTATIONS[name, choice.kernel]
    return DescribedKernel(kernel, str(choice))
