"""The kernels that are chosen on this GPU, as they are, against the reference kernels."""

from __future__ import annotations

import pytest
import torch

from anytron.kernels import fused as neutral
from anytron.kernels.contract import KernelName, KernelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")]
TYPES = [torch.float32, torch.bfloat16]


def randn(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def assert_same(kernels, name, call, *inputs, **options):
    """The chosen kernel agrees with float64 as well as the reference kernel does, in values and gradients."""
    dtype = inputs[0].dtype
    chosen = kernels.fused_kernel(KernelName(name), KernelSpec("cuda", dtype, options))
    reference = getattr(neutral, name)
    upstream = randn(*call(reference, *inputs).shape, seed=9, dtype=dtype)

    def evaluate(kernel, tensors):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
        value = call(kernel, *leaves)
        return [value.detach(), *torch.autograd.grad(value, leaves, upstream.to(value.dtype))]

    exact = evaluate(reference, [tensor.double() for tensor in inputs])
    plain, found = evaluate(reference, inputs), evaluate(chosen, inputs)
    for one, other, precise in zip(found, plain, exact, strict=True):
        scale = precise.abs().max().clamp(min=1e-3)
        error, usual = ((tensor.double() - precise).abs().max() / scale for tensor in (one, other))
        assert error <= 2 * usual + 1e-5, f"{chosen.description}: {error} where the reference kernel has {usual}"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm(kernels, zero_centered, dtype):
    options = {"zero_centered": zero_centered, "eps": 1e-6}
    for shape in ((70, 3, 1024), (5, 4, 16, 128)):
        x, weight = randn(*shape, dtype=dtype), 1 + 0.2 * randn(shape[-1], seed=1, dtype=dtype)
        assert_same(kernels, "rms_norm", lambda norm, x, w: norm(x, w, 1e-6, zero_centered), x, weight, **options)


@pytest.mark.parametrize("dtype", TYPES)
def test_swiglu(kernels, dtype):
    assert_same(kernels, "swiglu", lambda swiglu, x: swiglu(x), randn(70, 3, 2 * 1536, dtype=dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(kernels, interleaved, dtype):
    angles = 100 * randn(300, 1, 1, 32, dtype=torch.float32)
    freqs = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    x = randn(300, 1, 16, 128, dtype=dtype)
    assert_same(kernels, "rope", lambda rope, x: rope(x, freqs, interleaved), x)


def test_experts_without_tokens_pass_through_the_activation(kernels):
    swiglu = kernels.fused_kernel(KernelName.SWIGLU, KernelSpec("cuda"))
    x = randn(0, 256).requires_grad_()
    swiglu(x).sum().backward()
    assert x.grad.shape == (0, 256)


@pytest.mark.parametrize("dtype", TYPES)
def test_grouped_products_with_an_empty_group(kernels, dtype):
    weights = [randn(256, 128, seed=seed, dtype=dtype) for seed in range(4)]
    splits = [100, 0, 27, 173]
    x = randn(300, 128, dtype=dtype)
    assert_same(kernels, "grouped_mm", lambda product, x, *weights: product(x, weights, splits), x, *weights)


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam(kernels, decoupled):
    chosen = kernels.fused_kernel(KernelName.ADAM, KernelSpec("cuda", torch.float32))

    def run(kernel):
        params = [randn(300, 40, seed=1, dtype=torch.float32), randn(7, seed=2, dtype=torch.float32)]
        moments = [[torch.zeros_like(param) for param in params] for _ in range(2)]
        for step in (1, 2, 3):
            grads = [randn(*param.shape, seed=step, dtype=torch.float32) for param in params]
            kernel(
                params, grads, *moments, step=step, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1,
                decoupled=decoupled, bias_correction=True,
            )  # fmt: skip
        return [params, *moments]

    for found, expected in zip(run(chosen), run(neutral.adam), strict=True):
        torch.testing.assert_close(found, expected)
