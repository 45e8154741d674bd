"""Log-probs and entropies without logits on NVIDIA GPUs: in Triton where that is possible."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.kernels import make_log_prob
from anytron_cuda.capabilities import capabilities
from anytron_cuda.choices import DescribedKernel
from anytron_cuda.log_probs.choice import TRITON, choose_log_prob

if TYPE_CHECKING:
    from anytron.kernels import LogProbSpec


def log_prob_kernel(spec: LogProbSpec) -> DescribedKernel | None:
    """Supply a kernel for this GPU; None for another kind of device."""
    if spec.device_type != "cuda":
        return None
    choice = choose_log_prob(capabilities(), spec)
    arithmetic = None
    if choice.kernel == TRITON:
        from anytron_cuda.log_probs.triton_tiles import TritonTiles

        arithmetic = TritonTiles()
    return DescribedKernel(make_log_prob(spec, arithmetic), str(choice))
