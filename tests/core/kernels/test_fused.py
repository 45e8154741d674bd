"""Fused kernels against Hugging Face, torch.optim and their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from anytron.kernels.contract import KernelName, KernelSpec
from anytron.kernels.fused import adam, default_kernel, grouped_mm, layer_norm, rms_norm, rope, swiglu


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("name", list(KernelName))
def test_every_kernel_name_has_a_neutral_default(name):
    assert callable(default_kernel(name, KernelSpec("cpu")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_hugging_faces_bit_for_bit(dtype):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    module = Qwen3RMSNorm(48, eps=1e-6).to(dtype)
    torch.nn.init.normal_(module.weight, 1.0, 0.2)
    x = randn(7, 3, 48, dtype=dtype)
    assert torch.equal(rms_norm(x, module.weight, 1e-6, False), module(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_centred_rms_norm_is_hugging_faces(dtype):
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

    module = Qwen3NextRMSNorm(48, eps=1e-6).to(dtype)
    torch.nn.init.normal_(module.weight, 0.0, 0.2)
    x = randn(7, 3, 48, dtype=dtype)
    assert torch.equal(rms_norm(x, module.weight, 1e-6, True), module(x))


@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms_and_their_gradients_are_the_formulas(zero_centered):
    x = randn(5, 8, dtype=torch.float64).requires_grad_()
    weight, bias = (randn(8, seed=seed, dtype=torch.float64).requires_grad_() for seed in (1, 2))
    factor = weight + 1 if zero_centered else weight
    centered = x - x.mean(-1, keepdim=True)
    wanted = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * factor + bias
    got = layer_norm(x, weight, bias, 1e-5, zero_centered)
    torch.testing.assert_close(got, wanted)

    wanted_rms = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * factor
    got_rms = rms_norm(x, weight, 1e-5, zero_centered)
    torch.testing.assert_close(got_rms, wanted_rms, rtol=1e-5, atol=1e-6)
    for got_grad, wanted_grad in zip(
        torch.autograd.grad(got_rms.sin().sum(), (x, weight)),
        torch.autograd.grad(wanted_rms.sin().sum(), (x, weight)),
        strict=True,
    ):
        torch.testing.assert_close(got_grad, wanted_grad, rtol=1e-5, atol=1e-6)


def test_swiglu_gates_the_second_half_by_the_first():
    gate, up = randn(4, 6), randn(4, 6, seed=1)
    torch.testing.assert_close(swiglu(torch.cat([gate, up], -1)), gate / (1 + (-gate).exp()) * up)


def test_gradients_of_swiglu_are_the_formulas():
    x = randn(3, 5, 12, dtype=torch.float64).transpose(0, 1).requires_grad_()
    gate, up = x.chunk(2, -1)
    wanted = gate / (1 + (-gate).exp()) * up
    cotangent = randn(5, 3, 6, seed=1, dtype=torch.float64)
    (found,) = torch.autograd.grad(swiglu(x), x, cotangent)
    (expected,) = torch.autograd.grad(wanted, x, cotangent)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_rope_is_hugging_faces_and_lets_the_rest_of_a_head_pass():
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    x = randn(2, 5, 3, 12)  # [B, S, H, D], of which 8 entries turn
    angles = torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.5, 0.1, 0.01]))
    angles = torch.cat([angles, angles], -1)
    wanted, _ = apply_rotary_pos_emb(x[..., :8], x[..., :8], angles.cos()[None], angles.sin()[None], unsqueeze_dim=2)
    got = rope(x, angles[:, None], False)
    assert torch.equal(got[..., :8], wanted)
    assert torch.equal(got[..., 8:], x[..., 8:])


def test_interleaved_rope_turns_neighbours_as_complex_numbers():
    x = randn(5, 8)
    angles = torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.5, 0.1, 0.01]))
    turned = torch.view_as_complex(x.view(5, 4, 2)) * torch.polar(torch.ones_like(angles), angles)
    got = rope(x, angles.repeat_interleave(2, -1), True)
    torch.testing.assert_close(got, torch.view_as_real(turned).flatten(1))


def test_grouped_mm_multiplies_each_group_and_gives_an_empty_one_a_zero_gradient():
    x = randn(5, 3)
    weights = [randn(4, 3, seed=seed).requires_grad_() for seed in (1, 2, 3)]
    output = grouped_mm(x, weights, [2, 0, 3])
    torch.testing.assert_close(output, torch.cat([x[:2] @ weights[0].T, x[2:] @ weights[2].T]))
    output.sum().backward()
    assert torch.equal(weights[1].grad, torch.zeros(4, 3))


def steps_of(decoupled, params, moments, *, bias_correction=True, steps=4, weight_decay=0.1):
    for step in range(1, steps + 1):
        grads = [randn(*param.shape, seed=step).to(param.dtype) for param in params]
        adam(
            params,
            grads,
            [first for first, _ in moments],
            [second for _, second in moments],
            step=step,
            lr=0.02,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=weight_decay,
            decoupled=decoupled,
            bias_correction=bias_correction,
        )
        yield grads


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_takes_torchs_steps(decoupled):
    params = [randn(5), randn(2, 3)]
    theirs = [param.clone().requires_grad_() for param in params]
    family = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = family(theirs, lr=0.02, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    moments = [(torch.zeros_like(param), torch.zeros_like(param)) for param in params]
    for grads in steps_of(decoupled, params, moments):
        for param, grad in zip(theirs, grads, strict=True):
            param.grad = grad
        optimizer.step()
        torch.testing.assert_close(params, [param.detach() for param in theirs], rtol=1e-6, atol=1e-7)


def test_adam_without_bias_correction_is_the_bare_recursion():
    param = randn(6)
    wanted = param.double()
    first = second = torch.zeros(6, dtype=torch.float64)
    moments = [(torch.zeros(6), torch.zeros(6))]
    for (grad,) in steps_of(True, [param], moments, bias_correction=False, weight_decay=0.0):
        first = 0.9 * first + 0.1 * grad.double()
        second = 0.95 * second + 0.05 * grad.double().square()
        wanted = wanted - 0.02 * first / (second.sqrt() + 1e-8)
        torch.testing.assert_close(param.double(), wanted, rtol=1e-5, atol=1e-6)


def test_adam_computes_in_float32_for_bfloat16_parameters():
    param = randn(64, dtype=torch.bfloat16)
    reference = param.float()
    moments = [(torch.zeros(64), torch.zeros(64))]
    other = [(torch.zeros(64), torch.zeros(64))]
    list(steps_of(True, [param], moments, steps=1))
    for _ in steps_of(True, [reference], other, steps=1):
        pass
    assert param.dtype is torch.bfloat16
    assert math.isclose(float((param - reference.bfloat16()).abs().max()), 0.0, abs_tol=2e-2)
    torch.testing.assert_close(moments[0][0], other[0][0], rtol=1e-2, atol=1e-3)
