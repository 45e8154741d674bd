"""Calls of attention kernels, and the definition they are held against."""

from __future__ import annotations

import dataclasses
from itertools import accumulate

import torch

from anytron.base.traits import ModelTraits
from anytron.kernels.attention import make_attention
from anytron.kernels.contract import AttentionCall, AttentionSpec
from anytron.kernels.oracles.attention import reference_attention

SCALE = 0.3
PACKED = {True: "padding_causal", False: "padding"}
PADDED = {True: "causal", False: "no_mask"}
# A rounding to float16 of results, and some of what gradients are sums of: products of numbers up to about three.
TOLERANCE = {"atol": 8e-3, "rtol": 4e-3}
LAYERS = {
    "grouped": {"heads": 8, "kv_heads": 2, "size": 128, "v_size": 128},
    "latent": {"size": 192, "v_size": 128, "heads": 4, "kv_heads": 4},
    "window": {"window": (5, 0), "size": 64, "v_size": 64},
    "bidirectional": {"causal": False, "size": 40, "v_size": 36},
    "sinks": {"sinks": True, "size": 64, "v_size": 64},
}
"""What the real libraries compute on a GPU."""


def spec(causal=True, window=None, size=16, v_size=16, heads=4, kv_heads=2, **others):
    traits = ModelTraits(causal=causal, window=window)
    return AttentionSpec(heads, kv_heads, size, v_size, SCALE, traits, device_type="cuda", **others)


def operands(queries, keys, layer, leading=(), dtype=torch.float16, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (queries, layer.num_heads, layer.qk_dim),
        (keys, layer.num_kv_heads, layer.qk_dim),
        (keys, layer.num_kv_heads, layer.v_dim),
    )
    return [torch.randn(*leading, *shape, generator=generator).to(device, dtype) for shape in shapes]


def cumulative(lengths, device="cpu"):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def defined(layer, lengths, **others):
    """The reference of a layer over packed sequences."""
    return lambda query, key, value, sinks=None: reference_attention(
        query,
        key,
        value,
        lengths=lengths,
        scale=SCALE,
        causal=layer.traits.causal,
        window=layer.traits.window,
        sinks=sinks,
        **others,
    )


def assert_same(kernel, reference, inputs, tolerance=None):
    """Values and gradients of a kernel are those of the definition in float64."""
    tolerance = tolerance or TOLERANCE
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    wide = [tensor.detach().cpu().double().requires_grad_() for tensor in inputs]
    found, wanted = kernel(*leaves), reference(*wide)
    assert found.dtype == leaves[0].dtype
    torch.testing.assert_close(found.detach().cpu().double(), wanted.detach(), **tolerance)
    cotangent = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(found, leaves, cotangent.to(found))
    for name, gradient, want in zip("qkvs", gradients, torch.autograd.grad(wanted, wide, cotangent), strict=False):
        torch.testing.assert_close(
            gradient.cpu().double(), want, msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


def plain_operator(query, key, value, *, attn_mask=None, is_causal=False, dropout_p=0.0, scale, enable_gqa):
    """Torch's ``scaled_dot_product_attention`` in plain operations, each rounded to the operands' type."""
    if enable_gqa:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(-1, -2) * scale
    if is_causal:
        attn_mask = torch.ones_like(scores, dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    return scores.softmax(-1) @ value


def assert_computes(kernel, layer, device):
    """A kernel computes packed sequences of a layer, in bfloat16, as well as plain operations do."""
    # Two rows of padding at the end; sequences without queries; fewer queries than keys, and more.
    queries, keys = [70, 0, 33, 6, 1], [70, 3, 50, 2, 9]
    lengths = [cumulative(side, device) for side in (queries, keys)]
    call = AttentionCall("thd", PACKED[layer.traits.causal], *lengths, None, None, max(queries), max(keys))
    inputs = operands(sum(queries) + 2, sum(keys) + 2, layer, dtype=torch.bfloat16, device=device)
    if layer.sinks:
        inputs.append(torch.tensor([-1.0, 0.5, 2.0, 4.0], device=device))

    def called(attend):
        return lambda q, k, v, sinks=None: attend(q, k, v, dataclasses.replace(call, sinks=sinks))

    plain = make_attention(layer, plain_operator)
    assert_as_good_as_plain(called(kernel), called(plain), defined(layer, queries, key_lengths=keys), inputs)


def assert_computes_masks(kernel, layer, device):
    """The same of padded rows with a mask."""
    mask = torch.rand(2, 1, 40, 40, generator=torch.Generator().manual_seed(1)) > 0.5
    mask[0, 0, 1] = True  # a row that sees nothing
    inputs = operands(40, 40, layer, leading=(2,), dtype=torch.bfloat16, device=device)

    def called(attend):
        return lambda q, k, v: attend(q, k, v, AttentionCall("bshd", "arbitrary", mask=mask.to(q.device)))

    plain = make_attention(layer, plain_operator)
    assert_as_good_as_plain(called(kernel), called(plain), called(make_attention(layer)), inputs)


def assert_computes_strided_rows(kernel, layer, device, dtype=torch.bfloat16):
    """The same of padded rows whose numbers do not lie side by side, with a mask that is turned, and of no query."""
    call = AttentionCall("bshd", PADDED[layer.traits.causal])
    inputs = operands(30, 30, layer, leading=(2,), dtype=dtype, device=device)
    apart = [torch.stack([one, one], -1)[..., 0] for one in inputs]
    mask = torch.rand(2, 1, 30, 30, generator=torch.Generator().manual_seed(1)).transpose(2, 3) > 0.5
    masked = AttentionCall("bshd", "arbitrary", mask=mask.to(device))
    assert (apart[0].stride(-1), masked.mask.stride(-1)) == (2, 30)
    for one in (call, masked):
        assert torch.equal(kernel(*apart, one), kernel(*inputs, one))
    none = [inputs[0][:, :0], *inputs[1:]]
    leaves = [tensor.detach().requires_grad_() for tensor in none]
    output = kernel(*leaves, call)
    assert output.shape == (2, 0, layer.num_heads, layer.v_dim)
    assert not any(gradient.any() for gradient in torch.autograd.grad(output.sum(), leaves))


def assert_as_good_as_plain(kernel, plain, reference, inputs):
    """Values and gradients are as near to the definition in float64 as those of plain operations in the same type.

    Twice their largest error is allowed, as in FlashAttention's own tests, and the rounding of the result besides.
    """
    wide = [tensor.detach().cpu().double() for tensor in inputs]
    generator = torch.Generator().manual_seed(1)
    cotangent = torch.randn(reference(*wide).shape, generator=generator).to(inputs[0].dtype)

    def evaluate(function, operands):
        leaves = [operand.detach().clone().requires_grad_() for operand in operands]
        value = function(*leaves)
        return [value.detach(), *torch.autograd.grad(value, leaves, cotangent.to(value))]

    found, usual, exact = evaluate(kernel, inputs), evaluate(plain, inputs), evaluate(reference, wide)
    for name, one, other, precise in zip(("output", *"qkvs"), found, usual, exact, strict=False):
        assert one.dtype == other.dtype
        error, plain_error = (float((each.cpu().double() - precise).abs().max()) for each in (one, other))
        allowed = 2 * plain_error + 2**-8 * float(precise.abs().max())
        assert error <= allowed, f"{name} is off by {error:.3g}, plain operations by {plain_error:.3g}"
