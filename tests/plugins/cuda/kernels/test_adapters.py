"""Each adapter gives the reference kernel's values and gradients, and those of float64.

Liger's and flash-attn's functions are stand-ins with their signatures; torch's are its own, which run on a CPU too.
"""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anytron.kernels import fused as neutral

pytestmark = pytest.mark.usefixtures("libraries")
TOLERANCES = {torch.float32: {"atol": 2e-5, "rtol": 2e-5}, torch.bfloat16: {"atol": 3e-2, "rtol": 2e-2}}
sizes = st.integers(1, 5)
seeds = st.integers(0, 2**31)


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def evaluate(kernel, inputs, upstream):
    """Values and gradients of a sum in which the result stands twice, so that its gradient has two readers."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    value = kernel(*leaves)
    weights = upstream.to(value.dtype)
    beside = torch.zeros_like(value, requires_grad=True)
    *found, read = torch.autograd.grad(value + beside, [*leaves, beside], weights)
    assert torch.equal(read, weights), "the kernel wrote over a gradient that is not its own"
    return [value.detach(), *found]


def assert_same(kernel, reference, *inputs, dtype=torch.float32):
    """``kernel`` agrees with the reference in the type of its inputs, and with the reference in float64."""
    upstream = randn(*reference(*inputs).shape, seed=1)
    found = evaluate(kernel, [tensor.to(dtype) for tensor in inputs], upstream)
    same_type = evaluate(reference, [tensor.to(dtype) for tensor in inputs], upstream)
    exact = evaluate(reference, [tensor.to(dtype).double() for tensor in inputs], upstream.to(dtype))
    for one, plain, precise in zip(found, same_type, exact, strict=True):
        assert one.dtype == plain.dtype
        torch.testing.assert_close(one, plain, **TOLERANCES[dtype])
        torch.testing.assert_close(one.double(), precise, **TOLERANCES[dtype])


def norms(kernels):
    return {"liger": kernels.liger_rms_norm, "torch": kernels.torch_rms_norm}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("library", ["liger", "torch"])
@settings(max_examples=10)
@given(rows=sizes, batch=sizes, half=sizes, seed=seeds)
def test_rms_norm(kernels, library, zero_centered, dtype, rows, batch, half, seed):
    call = {"eps": 1e-5, "zero_centered": zero_centered}
    kernel = functools.partial(norms(kernels)[library], **call)
    x, weight = randn(rows, batch, 2 * half, seed=seed), 1 + 0.2 * randn(2 * half, seed=seed + 1)
    assert_same(kernel, functools.partial(neutral.rms_norm, **call), x, weight, dtype=dtype)


@pytest.mark.parametrize("library", ["liger", "torch"])
def test_rms_norm_of_two_types_gives_the_wider_one_as_the_reference_does(kernels, library):
    x, weight = randn(3, 8, seed=1).bfloat16(), randn(8, seed=2)
    found = norms(kernels)[library](x, weight, 1e-5, False)
    assert found.dtype == torch.float32
    assert torch.equal(found, neutral.rms_norm(x, weight, 1e-5, False))


def test_ligers_casts_are_the_reference_kernels(kernels):
    """Rounded after the norm, and again after the factor: Hugging Face's order; with 1 + weight once, at the end."""
    for zero_centered in (False, True):
        x, weight = randn(64, 64, seed=3).bfloat16(), (1 + 0.2 * randn(64, seed=4)).bfloat16()
        found = kernels.liger_rms_norm(x, weight, 1e-5, zero_centered)
        expected = neutral.rms_norm(x, weight, 1e-5, zero_centered)
        assert (found != expected).float().mean() < 1e-3  # stand-in: float64 rounds a few halves otherwise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=10)
@given(rows=st.integers(0, 5), batch=sizes, half=sizes, seed=seeds)
@example(rows=0, batch=1, half=1, seed=0)
def test_swiglu(kernels, dtype, rows, batch, half, seed):
    x = randn(rows, batch, 2 * half, seed=seed)
    assert_same(kernels.liger_swiglu, neutral.swiglu, x, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("angles_of", ["positions", "tokens", "heads", "packed"])
@settings(max_examples=10)
@given(length=sizes, batch=sizes, heads=st.integers(2, 4), half=sizes, rest=st.integers(0, 3), seed=seeds)
def test_rope(kernels, angles_of, interleaved, dtype, length, batch, heads, half, rest, seed):
    """Angles by position, by token (mrope, packed sequences), and by head, which the library does not have."""
    leading = {"positions": (length, 1, 1), "tokens": (length, batch, 1), "heads": (length, 1, heads)}
    angles = 5 * randn(*leading.get(angles_of, (length, 1)), half, seed=seed)
    freqs = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    shape = (length, heads) if angles_of == "packed" else (length, batch, heads)
    x = randn(*shape, 2 * half + rest, seed=seed + 1)
    call = {"freqs": freqs, "interleaved": interleaved}
    kernel, reference = (functools.partial(rope, **call) for rope in (kernels.flash_attn_rope, neutral.rope))
    assert_same(kernel, reference, x, dtype=dtype)


def test_rope_of_queries_that_are_a_part_of_a_projection(kernels):
    """Megatron's queries are strided views."""
    projected = randn(6, 2, 3, 24, seed=1)
    freqs = randn(6, 1, 1, 4, seed=2).repeat(1, 1, 1, 2)
    kernel, reference = (
        lambda x, rope=rope: rope(x[..., 8:16], freqs, False) for rope in (kernels.flash_attn_rope, neutral.rope)
    )
    assert_same(kernel, reference, projected)


def test_heads_that_the_library_does_not_take_are_turned_by_the_reference_kernel(kernels):
    x, freqs = randn(3, 2, 1, 300, seed=1), randn(3, 1, 1, 300, seed=2)
    assert torch.equal(kernels.flash_attn_rope(x, freqs, False), neutral.rope(x, freqs, False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=20)
@given(
    splits=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    width=st.sampled_from([3, 8, 16]),
    out=st.sampled_from([5, 8, 24]),
    seed=seeds,
)
def test_grouped_products(kernels, dtype, splits, width, out, seed):
    """Empty groups, no rows at all, and rows that are no multiple of 16 bytes; torch's own operator."""
    x = randn(sum(splits), width, seed=seed)
    weights = [randn(out, width, seed=seed + index) for index in range(len(splits))]
    kernel, reference = (
        lambda x, *weights, product=product: product(x, weights, splits)
        for product in (kernels.torch_grouped_mm, neutral.grouped_mm)
    )
    assert_same(kernel, reference, x, *weights, dtype=dtype)


def test_torchs_operator_is_used_where_it_can_be_and_stacks_are_not_kept(kernels, monkeypatch):
    products = []
    operator = torch.nn.functional.grouped_mm
    monkeypatch.setattr(
        torch.nn.functional,
        "grouped_mm",
        lambda x, y, offs: products.append((y.shape, offs.tolist())) or operator(x, y, offs=offs),
    )
    x, weights = randn(5, 8, seed=1).requires_grad_(), [randn(16, 8, seed=seed).requires_grad_() for seed in range(3)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda x: x):
        product = kernels.torch_grouped_mm(x, weights, [2, 0, 3])
    product.sum().backward()
    assert products == [((3, 8, 16), [2, 2, 5]), ((3, 16, 8), [2, 2, 5]), ((5, 8), [2, 5])], "no empty sum"
    assert torch.equal(weights[1].grad, torch.zeros(16, 8))
    assert (3, 16, 8) not in kept


def test_frozen_experts_cost_no_gradient(kernels):
    x, weights = randn(5, 8, seed=1).requires_grad_(), [randn(16, 8, seed=seed) for seed in range(2)]
    kernels.torch_grouped_mm(x, weights, [2, 3]).sum().backward()
    assert x.grad is not None
    assert all(weight.grad is None for weight in weights)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adam(kernels, decoupled, bias_correction, weight_decay, dtype):
    def run(kernel):
        params = [randn(3, 4, seed=1).to(dtype), randn(7, seed=2).to(dtype), torch.zeros(0, dtype=dtype)]
        state = [params, [], *([torch.zeros_like(param, dtype=torch.float32) for param in params] for _ in range(2))]
        for step in (1, 2, 3):
            state[1] = [randn(*param.shape, seed=step).to(dtype) for param in params]
            kernel(
                *state, step=step, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=weight_decay,
                decoupled=decoupled, bias_correction=bias_correction,
            )  # fmt: skip
        return state

    for found, expected in zip(run(kernels.torch_adam), run(neutral.adam), strict=True):
        torch.testing.assert_close(found, expected)


def test_torchs_adam_is_used_for_both_forms(kernels, monkeypatch):
    called = []
    for name in ("_fused_adam_", "_fused_adamw_"):
        monkeypatch.setattr(torch, name, lambda *_, name=name, **__: called.append(name))
    call = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "bias_correction": True}
    for decoupled in (False, True):
        kernels.torch_adam(*([torch.zeros(2)] for _ in range(4)), step=1, decoupled=decoupled, **call)
    assert called == ["_fused_adam_", "_fused_adamw_"]


SABOTEURS = {
    "Liger's default, which writes over the gradient": lambda liger, _: (
        lambda x, w: liger.LigerRMSNormFunction.apply(x, w, 1e-5)
    ),
    "a factor without its 1": lambda liger, _: (
        lambda x, w: liger.LigerRMSNormFunction.apply(x, w, 1e-5, 1.0, "llama", False)
    ),
    "another epsilon": lambda _, kernels: lambda x, w: kernels.torch_rms_norm(x, w, 1e-2, False),
}


@pytest.mark.parametrize("saboteur", SABOTEURS)
def test_a_wrong_adapter_is_noticed(kernels, saboteur):
    from liger_kernel import ops

    x, weight = randn(4, 3, 8, seed=1), randn(8, seed=2)
    reference = functools.partial(neutral.rms_norm, eps=1e-5, zero_centered=False)
    with pytest.raises(AssertionError):
        assert_same(SABOTEURS[saboteur](ops, kernels), reference, x, weight)
