"""Choose the implementation of a fused kernel: a pure function of the machine's capabilities and the kernel's spec.

The order was not measured on a GPU; it follows the reports of the libraries' authors.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from packaging.version import Version

from anytron.kernels import KernelName
from anytron_cuda.capabilities import NEUTRAL, Choice, choose

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from anytron.kernels import KernelSpec
    from anytron_cuda.capabilities import Capabilities

LIGER, TORCH, FLASH_ATTN = "liger", "torch", "flash-attn"

LIGER_MINIMUM = "0.8.2"
"""First version with ``LigerFusedGateUpSiLUMulFunction``; the older function copies both halves and is slower than
plain torch (``liger_kernel/megatron/swiglu.py``)."""
FLASH_ATTN_MINIMUM = "2.1"
"""First version whose ``flash_attn.layers.rotary.apply_rotary_emb`` is in Triton, out of place and for any strides."""
FUSED_RMS_NORM = "2.9"
"""First torch in which ``rms_norm`` is one CUDA kernel (pytorch #153666)."""
GROUPED_MM = "2.8"
"""First torch with ``_grouped_mm`` and its gradient; ``torch.nn.functional.grouped_mm`` from 2.10 on is the same."""
GROUPED_MM_GPUS = (9, 10)
"""Major compute capabilities of Hopper and Blackwell. On other GPUs ``_grouped_mm`` is a loop that waits for the GPU to
read the groups' sizes (``aten/src/ATen/native/cuda/GroupedBlas.cpp``, ``_grouped_mm_cuda``); the neutral kernel is a
loop that has them on the host."""


def choose_kernel(capabilities: Capabilities, name: KernelName, spec: KernelSpec) -> Choice:
    """Choose an implementation.

    Args:
        capabilities: The GPU and the libraries.
        name: The kernel.
        spec: Element type and options of the kernel.

    Returns:
        The choice; its ``kernel`` is a key of :data:`anytron_cuda.kernels.IMPLEMENTATIONS` for this name.
    """
    rule = _RULES.get(name)
    return Choice(NEUTRAL) if rule is None else rule(capabilities, spec)


def _rms_norm(capabilities: Capabilities, spec: KernelSpec) -> Choice:
    if spec.dtype is torch.float32:
        # The reference kernel calls torch's fused one then, with the factor that is asked for.
        return Choice(NEUTRAL)
    return choose(
        [
            (LIGER, _obstacle_to_liger(capabilities)),
            (TORCH, _obstacle_to_torch_rms_norm(capabilities, spec)),
            (NEUTRAL, None),
        ]
    )


def _obstacle_to_liger(capabilities: Capabilities) -> str | None:
    return capabilities.missing("liger_kernel", LIGER_MINIMUM) or capabilities.missing("triton")


def _obstacle_to_torch_rms_norm(capabilities: Capabilities, spec: KernelSpec) -> str | None:
    if capabilities.torch < Version(FUSED_RMS_NORM):
        return f"torch {capabilities.torch} is older than {FUSED_RMS_NORM}"
    if spec.options.get("zero_centered"):
        return "its kernel needs operands of one type, and 1 + weight is float32"
    return None


def _swiglu(capabilities: Capabilities, spec: KernelSpec) -> Choice:
    del spec
    return choose([(LIGER, _obstacle_to_liger(capabilities)), (NEUTRAL, None)])


def _rope(capabilities: Capabilities, spec: KernelSpec) -> Choice:
    # Liger's turns queries and keys in one call and overwrites them: another contract (liger_kernel/ops/rope.py).
    del spec
    flash_attn = capabilities.missing("flash_attn", FLASH_ATTN_MINIMUM)
    return choose(
        [(FLASH_ATTN, flash_attn or capabilities.missing("triton")), (NEUTRAL, None)],
    )


def _grouped_mm(capabilities: Capabilities, spec: KernelSpec) -> Choice:
    obstacle = None
    major, minor = capabilities.compute_capability
    if capabilities.torch < Version(GROUPED_MM):
        obstacle = f"torch {capabilities.torch} is older than {GROUPED_MM}"
    elif major not in GROUPED_MM_GPUS:
        obstacle = f"its kernel is for compute capability 9.x and 10.x, and this GPU has {major}.{minor}"
    elif spec.dtype is not torch.bfloat16:
        obstacle = f"its kernel is for bfloat16, and the weights are {spec.dtype}"
    return choose([(TORCH, obstacle), (NEUTRAL, None)])


def _adam(capabilities: Capabilities, spec: KernelSpec) -> Choice:
    del capabilities, spec
    return Choice(TORCH)


_RULES: Mapping[KernelName, Callable[[Capabilities, KernelSpec], Choice]] = MappingProxyType(
    {
        KernelName.RMS_NORM: _rms_norm,
        KernelName.SWIGLU: _swiglu,
        KernelName.ROPE: _rope,
        KernelName.GROUPED_MM: _grouped_mm,
        KernelName.ADAM: _adam,
    }
)
"""Other kernels are always neutral: layer norm, which is torch's own fused kernel, and the two of Gated DeltaNet."""
