"""torch_npu's fused operators behind the neutral signatures: the neutral kernels' values and gradients."""

import pytest
import torch
from anytron_ascend_simulator import aclnn

from anytron.kernels import fused as neutral
from anytron.kernels.contract import KernelName
from anytron_ascend.kernels import fused


def assert_same(name, call, *inputs):
    """``call(kernel, *inputs)`` gives the same with both kernels, gradients too."""
    results = []
    for kernel, device in ((getattr(neutral, name), "cpu"), (fused.fused_kernel(KernelName(name)), "npu")):
        leaves = [tensor.clone().to(device).requires_grad_() for tensor in inputs]
        value = call(kernel, *leaves)
        results.append([value.detach(), *torch.autograd.grad(value.square().sum(), leaves)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("zero_centered", [True, False])
def test_rms_norm(zero_centered):
    assert_same("rms_norm", lambda norm, x, w: norm(x, w, 1e-6, zero_centered), torch.randn(3, 5, 8), torch.randn(8))


def test_swiglu():
    assert_same("swiglu", lambda swiglu, x: swiglu(x), torch.randn(3, 2, 8))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", [(5, 2, 3, 8), (5, 3, 8)])
def test_rope_of_a_part_of_the_head(interleaved, shape):
    angles = torch.randn(5, *[1] * (len(shape) - 2), 6)
    assert_same("rope", lambda rope, x: rope(x, angles.to(x.device), interleaved), torch.randn(*shape))


def test_grouped_products_with_an_empty_group():
    weights = [torch.randn(6, 4) for _ in range(3)]
    before = aclnn.CALLS["aclnnGroupedMatmulV4"]
    assert_same("grouped_mm", lambda product, x, *w: product(x, w, [2, 0, 3]), torch.randn(5, 4), *weights)
    assert aclnn.CALLS["aclnnGroupedMatmulV4"] == before + 3


@pytest.mark.parametrize(
    ("decoupled", "bias_correction", "weight_decay", "fused_operator"),
    [(True, True, 0.1, True), (False, True, 0.0, True), (False, True, 0.1, False), (True, False, 0.1, False)],
)
def test_adam(decoupled, bias_correction, weight_decay, fused_operator):
    start = [[torch.randn(3, 4)], [torch.randn(3, 4)], [torch.zeros(3, 4)], [torch.zeros(3, 4)]]
    before = aclnn.CALLS["aclnnApplyAdamWV2"]
    found = []
    for kernel, device in ((neutral.adam, "cpu"), (fused.adam, "npu")):
        state = [[tensor.clone().to(device) for tensor in tensors] for tensors in start]
        for step in (1, 2, 3):
            kernel(
                *state, step=step, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=weight_decay,
                decoupled=decoupled, bias_correction=bias_correction,
            )  # fmt: skip
        found.append([tensors[0].cpu() for tensors in state])
    torch.testing.assert_close(*found)
    assert aclnn.CALLS["aclnnApplyAdamWV2"] - before == (3 if fused_operator else 0)


def test_what_torch_npu_does_not_have_is_left_to_the_neutral_kernel():
    assert fused.fused_kernel(KernelName.LAYER_NORM) is None
