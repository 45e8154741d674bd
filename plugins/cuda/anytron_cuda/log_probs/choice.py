"""Whether log-probs are computed in Triton: a pure function of what there is and what is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron_cuda.choices import NEUTRAL, Choice, choose

if TYPE_CHECKING:
    from anytron.kernels import LogProbSpec
    from anytron_cuda.capabilities import Capabilities

TRITON = "triton"

TRITON_MINIMUM = "3.0"
"""First with ``tl.dot(input_precision=)``."""
AMPERE = (8, 0)
"""First with products of bfloat16, and with the shared memory that the blocks of ``triton_tiles.Blocks`` need."""


def choose_log_prob(capabilities: Capabilities, spec: LogProbSpec) -> Choice:
    """Choose an implementation: :data:`TRITON` or the neutral one, which makes tiles of logits in plain torch.

    Args:
        capabilities: The GPU and the libraries.
        spec: The element type matters.
    """
    return choose([(TRITON, _obstacle(capabilities, spec)), (NEUTRAL, None)])


def _obstacle(capabilities: Capabilities, spec: LogProbSpec) -> str | None:
    if capabilities.compute_capability < AMPERE:
        major, minor = capabilities.compute_capability
        return f"it needs compute capability 8.0 or later, and this GPU has {major}.{minor}"
    if spec.dtype not in (torch.bfloat16, torch.float16):
        # Without tensor cores the products are all that counts, and cuBLAS has the faster ones.
        return f"it is for 16-bit operands, and these are {spec.dtype}"
    return capabilities.missing("triton", TRITON_MINIMUM)
