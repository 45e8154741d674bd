"""Log-probs and entropies without logits on NVIDIA GPUs: in Triton where that is possible."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.kernels import make_log_prob
from anytron_cuda.capabilities import NEUTRAL, Choice, DescribedKernel, capabilities, choose

if TYPE_CHECKING:
    from anytron.kernels import LogProbSpec
    from anytron_cuda.capabilities import Capabilities

TRITON = "triton"

TRITON_MINIMUM = "3.0"
"""First version with ``tl.dot(input_precision=)``."""
AMPERE = (8, 0)
"""First compute capability with products of bfloat16, and with the shared memory that ``triton_tiles.Blocks`` needs."""


def log_prob_kernel(spec: LogProbSpec) -> DescribedKernel | None:
    """Supply a kernel for this GPU; None for another kind of device, and where kernels must be company-invariant."""
    if spec.device_type != "cuda" or spec.invariant:
        return None
    choice = choose_log_prob(capabilities(), spec)
    arithmetic = None
    if choice.kernel == TRITON:
        from anytron_cuda.log_probs.triton_tiles import TritonTiles

        arithmetic = TritonTiles()
    return DescribedKernel(make_log_prob(spec, arithmetic), str(choice))


def choose_log_prob(offered: Capabilities, spec: LogProbSpec) -> Choice:
    """Choose an implementation: :data:`TRITON` or Anytron's default, which makes tiles of logits in plain torch.

    Args:
        offered: The GPU and the libraries.
        spec: Spec of the kernel, of which only the element type is used.
    """
    return choose([(TRITON, _obstacle(offered, spec)), (NEUTRAL, None)])


def _obstacle(offered: Capabilities, spec: LogProbSpec) -> str | None:
    if offered.compute_capability < AMPERE:
        major, minor = offered.compute_capability
        return f"it needs compute capability 8.0 or later, and this GPU has {major}.{minor}"
    if spec.dtype not in (torch.bfloat16, torch.float16):
        # Without tensor cores the products are all that counts, and cuBLAS has the faster ones.
        return f"it is for 16-bit operands, and these are {spec.dtype}"
    return offered.missing("triton", TRITON_MINIMUM)
