"""Which fused kernel is used, and why not a faster one, as a table."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version

from anytron.device.loading import hooks_of
from anytron.kernels.contract import KernelName, KernelSpec

HOPPER, AMPERE, BLACKWELL, GEFORCE = (9, 0), (8, 0), (10, 0), (12, 0)
BFLOAT16 = {"dtype": torch.bfloat16}
ZERO_CENTRED = {**BFLOAT16, "options": {"zero_centered": True}}
TRITON, FLASH_ATTN = {"triton": "3.5"}, {"flash_attn": "2.8.3"}
LIGER = {"liger_kernel": "0.8.5", **TRITON}

# Which kernel, what is asked, the GPU, torch, libraries; and what is used.
TABLE = [
    ("rms_norm", BFLOAT16, HOPPER, "2.13", LIGER, "liger"),
    ("rms_norm", BFLOAT16, HOPPER, "2.13", {}, "torch (not liger: liger-kernel is not installed)"),
    (
        "rms_norm", BFLOAT16, AMPERE, "2.8.0+cu128", {"liger_kernel": "0.8.0"},
        "neutral (not liger: liger-kernel 0.8.0 is older than 0.8.2; not torch: torch 2.8.0+cu128 is older than 2.9)",
    ),
    ("rms_norm", ZERO_CENTRED, HOPPER, "2.13", LIGER, "liger"),
    (
        "rms_norm", ZERO_CENTRED, HOPPER, "2.13", {},
        (
            "neutral (not liger: liger-kernel is not installed; not torch: its kernel needs operands of one type, "
            "and 1 + weight is float32)"
        ),
    ),
    ("rms_norm", {"dtype": torch.float32}, HOPPER, "2.13", LIGER, "neutral"),
    ("layer_norm", BFLOAT16, HOPPER, "2.13", LIGER, "neutral"),
    ("swiglu", {}, AMPERE, "2.6", LIGER, "liger"),
    ("swiglu", {}, AMPERE, "2.6", {}, "neutral (not liger: liger-kernel is not installed)"),
    ("swiglu", {}, HOPPER, "2.13", {"liger_kernel": "0.8.5"}, "neutral (not liger: triton is not installed)"),
    ("rope", BFLOAT16, HOPPER, "2.13", {**FLASH_ATTN, **TRITON}, "flash-attn"),
    ("rope", BFLOAT16, HOPPER, "2.13", FLASH_ATTN, "neutral (not flash-attn: triton is not installed)"),
    ("rope", BFLOAT16, HOPPER, "2.13", LIGER, "neutral (not flash-attn: flash-attn is not installed)"),
    ("grouped_mm", BFLOAT16, HOPPER, "2.8", {}, "torch"),
    ("grouped_mm", BFLOAT16, BLACKWELL, "2.13", {}, "torch"),
    (
        "grouped_mm", BFLOAT16, AMPERE, "2.13", {},
        "neutral (not torch: its kernel is for compute capability 9.x and 10.x, and this GPU has 8.0)",
    ),
    (
        "grouped_mm", BFLOAT16, GEFORCE, "2.13", {},
        "neutral (not torch: its kernel is for compute capability 9.x and 10.x, and this GPU has 12.0)",
    ),
    ("grouped_mm", BFLOAT16, HOPPER, "2.7.1", {}, "neutral (not torch: torch 2.7.1 is older than 2.8)"),
    (
        "grouped_mm", {"dtype": torch.float32}, HOPPER, "2.13", {},
        "neutral (not torch: its kernel is for bfloat16, and the weights are torch.float32)",
    ),
    ("adam", {"dtype": torch.float32}, AMPERE, "2.6", {}, "torch"),
    ("causal_conv1d", {}, HOPPER, "2.13", LIGER, "neutral"),
    ("gated_delta_rule", {}, HOPPER, "2.13", LIGER, "neutral"),
    ("linear", BFLOAT16, HOPPER, "2.13", LIGER, "neutral"),
    ("state_space_scan", {}, HOPPER, "2.13", LIGER, "neutral"),
]  # fmt: skip


def capabilities_of(gpu, torch_version, libraries, broken=()):
    from anytron_cuda.capabilities import Capabilities

    versions = {name: Version(version) for name, version in libraries.items()}
    return Capabilities(gpu, Version(torch_version), versions, dict(broken))


@pytest.mark.parametrize(("name", "asked", "gpu", "torch_version", "libraries", "expected"), TABLE)
def test_the_choice_and_its_reason(kernels, name, asked, gpu, torch_version, libraries, expected):
    found = capabilities_of(gpu, torch_version, libraries)
    choice = kernels.choose_kernel(found, KernelName(name), KernelSpec("cuda", **asked))
    assert str(choice) == expected
    assert choice.kernel == "neutral" or (KernelName(name), choice.kernel) in kernels.IMPLEMENTATIONS


def test_every_implementation_is_chosen_somewhere(kernels):
    used = {(KernelName(name), expected.partition(" ")[0]) for name, *_, expected in TABLE}
    assert kernels.IMPLEMENTATIONS.keys() <= used
    assert {name for name, _ in used} == set(KernelName)


def test_a_library_that_was_built_for_another_torch_is_named(kernels):
    found = capabilities_of(HOPPER, "2.13", {"triton": "3.5"}, {"flash_attn": "undefined symbol: _ZN3c10"})
    choice = kernels.choose_kernel(found, KernelName.ROPE, KernelSpec("cuda"))
    assert str(choice) == "neutral (not flash-attn: flash-attn cannot be imported: undefined symbol: _ZN3c10)"


def test_what_is_supplied_says_what_it_is(kernels, monkeypatch):
    from anytron_cuda import CudaPlatform

    monkeypatch.setattr(kernels, "capabilities", lambda: capabilities_of(HOPPER, "2.13", LIGER))
    hooks = hooks_of(CudaPlatform())
    kernel = hooks.fused_kernel(KernelName.SWIGLU, KernelSpec("cuda"))
    assert (kernel.kernel, kernel.description) == (kernels.liger_swiglu, "liger")
    neutral = hooks.fused_kernel(KernelName.LAYER_NORM, KernelSpec("cuda"))
    weight = torch.ones(4)
    assert torch.equal(
        neutral(torch.ones(2, 4), weight, None, 1e-5, zero_centered=False),
        torch.nn.functional.layer_norm(torch.ones(2, 4), (4,), weight),
    )
    assert hooks.suppliers() == {"fused_kernel layer_norm": "cuda", "fused_kernel swiglu": "cuda"}
    hooks.fused_kernel(KernelName.SWIGLU, KernelSpec("cpu"))
    assert hooks.suppliers()["fused_kernel swiglu"] == "cuda, neutral-default"
