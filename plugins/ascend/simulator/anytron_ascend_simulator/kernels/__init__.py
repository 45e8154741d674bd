"""Reference kernels of aclnn operators: each checks the documented contract, then computes in float32.

A kernel gets the arguments of :data:`anytron_ascend_simulator.signatures.SIGNATURES`, tensors as CPU
tensors over the device's memory, and writes its results into the outputs. A broken contract is a
:class:`ContractError`; its text reaches the caller through torch_npu's own error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron_ascend_simulator.kernels import dropout, flash_attention, fused, permutation, routing_permutation

if TYPE_CHECKING:
    from collections.abc import Callable

KERNELS: dict[str, Callable[..., None]] = {
    **fused.KERNELS,
    **dropout.KERNELS,
    **flash_attention.KERNELS,
    **permutation.KERNELS,
    **routing_permutation.KERNELS,
}
"""Kernels by the name of their entry point."""
