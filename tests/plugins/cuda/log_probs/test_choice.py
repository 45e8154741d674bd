"""When log-probs are computed in Triton."""

import pytest
import torch
from packaging.version import Version

from anytron.kernels.contract import LogProbSpec


@pytest.mark.parametrize(
    ("compute_capability", "dtype", "libraries", "broken", "chosen"),
    [
        ((9, 0), torch.bfloat16, {"triton": "3.4.0"}, {}, "triton"),
        ((8, 0), torch.float16, {"triton": "3.4.0"}, {}, "triton"),
        (
            (7, 5),
            torch.float16,
            {"triton": "3.4.0"},
            {},
            "neutral (not triton: it needs compute capability 8.0 or later, and this GPU has 7.5)",
        ),
        (
            (9, 0),
            torch.float32,
            {"triton": "3.4.0"},
            {},
            "neutral (not triton: it is for 16-bit operands, and these are torch.float32)",
        ),
        ((9, 0), torch.bfloat16, {}, {}, "neutral (not triton: triton is not installed)"),
        ((9, 0), torch.bfloat16, {"triton": "2.3.1"}, {}, "neutral (not triton: triton 2.3.1 is older than 3.0)"),
        (
            (9, 0),
            torch.bfloat16,
            {},
            {"triton": "undefined symbol"},
            "neutral (not triton: triton cannot be imported: undefined symbol)",
        ),
    ],
)
def test_choice(plugin, compute_capability, dtype, libraries, broken, chosen):
    from anytron_cuda.capabilities import Capabilities
    from anytron_cuda.log_probs import choose_log_prob

    versions = {name: Version(version) for name, version in libraries.items()}
    offered = Capabilities(compute_capability, Version("2.10"), versions, broken)
    assert str(choose_log_prob(offered, LogProbSpec(16, 1, 4, "cuda", dtype))) == chosen


def test_other_devices_are_left_to_their_platforms(plugin):
    from anytron_cuda.log_probs import log_prob_kernel

    assert log_prob_kernel(LogProbSpec(16, 1, 4, "cpu", torch.bfloat16)) is None
