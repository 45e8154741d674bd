"""The real libraries, where there is a GPU: each kernel that this machine has against the definition."""

from __future__ import annotations

import pytest
import torch

from anytron.kernels.contract import AttentionCall
from tests.plugins.cuda.attention.cases import PACKED, assert_same, cumulative, defined, operands, spec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")]
KERNELS = ("flash_attention_3", "flash_attention_2", "varlen", "sdpa")
LAYERS = {
    "grouped": {"heads": 8, "kv_heads": 2, "size": 128, "v_size": 128},
    "latent": {"size": 192, "v_size": 128, "heads": 4, "kv_heads": 4},
    "window": {"window": (5, 0), "size": 64, "v_size": 64},
    "bidirectional": {"causal": False, "size": 40, "v_size": 36},
    "sinks": {"sinks": True, "size": 64, "v_size": 64},
}
# Products of bfloat16 numbers, as often summed as a sequence is long.
TOLERANCE = {"atol": 3e-2, "rtol": 3e-2}


def kernel_of(name, layer):
    from anytron_cuda.attention.choice import CANDIDATES
    from anytron_cuda.capabilities import capabilities

    obstacle = CANDIDATES[name].obstacle(capabilities(), layer)
    if obstacle:
        pytest.skip(obstacle)
    return CANDIDATES[name].make(layer)


def call_of(layer, queries, keys, **others):
    lengths = [cumulative(side, "cuda") for side in (queries, keys)]
    return AttentionCall("thd", PACKED[layer.traits.causal], *lengths, None, None, max(queries), max(keys), **others)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("case", LAYERS)
def test_the_library_computes_the_definition(name, case):
    layer = spec(**LAYERS[case])
    kernel = kernel_of(name, layer)
    # Two rows of padding at the end; sequences without queries; fewer queries than keys, and more.
    queries, keys = [70, 0, 33, 6, 1], [70, 3, 50, 2, 9]
    inputs = operands(sum(queries) + 2, sum(keys) + 2, layer, dtype=torch.bfloat16, device="cuda")
    sinks = torch.tensor([-1.0, 0.5, 2.0, 4.0], device="cuda") if layer.sinks else None
    reference = defined(layer, queries, key_lengths=keys)
    if sinks is None:
        assert_same(lambda q, k, v: kernel(q, k, v, call_of(layer, queries, keys)), reference, inputs, TOLERANCE)
        return
    assert_same(
        lambda q, k, v, s: kernel(q, k, v, call_of(layer, queries, keys, sinks=s)),
        reference,
        [*inputs, sinks],
        TOLERANCE,
    )


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_kernel_keeps_the_scores(name, dtype):
    layer = spec(heads=8, kv_heads=2, size=64, v_size=64)
    kernel, length = kernel_of(name, layer), 8192
    if dtype is torch.float32 and name != "sdpa":
        pytest.skip("it computes in float16 and bfloat16")
    inputs = [one.requires_grad_() for one in operands(length, length, layer, dtype=dtype, device="cuda")]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kernel(*inputs, call_of(layer, [length], [length])).sum().backward()
    scores = layer.num_heads * length**2 * dtype.itemsize
    assert torch.cuda.max_memory_allocated() - before < scores / 4


@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
def test_masks_are_no_reason_for_plain_operations(heads):
    layer = spec(True, None, 64, 32, *heads)
    mask = torch.rand(2, 1, 40, 40, generator=torch.Generator().manual_seed(1)) > 0.5
    mask[0, 0, 1] = True  # a row that sees nothing
    from anytron.kernels.attention import make_attention

    fused, neutral = kernel_of("sdpa", layer), make_attention(layer)
    inputs = operands(40, 40, layer, leading=(2,), dtype=torch.bfloat16, device="cuda")
    assert_same(
        lambda q, k, v: fused(q, k, v, AttentionCall("bshd", "arbitrary", mask=mask.cuda())),
        lambda q, k, v: neutral(q, k, v, AttentionCall("bshd", "arbitrary", mask=mask)),
        inputs,
        TOLERANCE,
    )
