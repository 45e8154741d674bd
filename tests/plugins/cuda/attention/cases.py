"""Calls of attention kernels, and the definition they are held against."""

from __future__ import annotations

from itertools import accumulate

import torch

from anytron.kernels.contract import AttentionSpec
from anytron.reference.attention import reference_attention
from anytron.traits import ModelTraits

SCALE = 0.3
PACKED = {True: "padding_causal", False: "padding"}
PADDED = {True: "causal", False: "no_mask"}
# One rounding of results to float16; gradients are sums of products of numbers near 1.
TOLERANCE = {"atol": 4e-3, "rtol": 4e-3}


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
