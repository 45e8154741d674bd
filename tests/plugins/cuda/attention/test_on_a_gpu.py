"""The real libraries, where there is a GPU: each kernel that this machine has against the definition."""

from __future__ import annotations

import pytest
import torch

from anytron.kernels.contract import AttentionCall
from tests.plugins.cuda.attention.cases import (
    LAYERS,
    assert_computes,
    assert_computes_masks,
    assert_computes_strided_rows,
    cumulative,
    operands,
    spec,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")]
KERNELS = ("flash_attention_3", "flash_attention_2", "varlen", "sdpa")


def kernel_of(name, layer):
    from anytron_cuda.attention.choice import CANDIDATES
    from anytron_cuda.capabilities import capabilities

    obstacle = CANDIDATES[name].obstacle(capabilities(), layer)
    if obstacle:
        pytest.skip(obstacle)
    return CANDIDATES[name].make(layer)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("case", LAYERS)
def test_the_library_computes_the_definition(name, case):
    layer = spec(**LAYERS[case])
    assert_computes(kernel_of(name, layer), layer, "cuda")


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_kernel_keeps_the_scores(name, dtype):
    layer = spec(heads=8, kv_heads=2, size=64, v_size=64)
    kernel, length = kernel_of(name, layer), 8192
    if dtype is torch.float32 and name != "sdpa":
        pytest.skip("it computes in float16 and bfloat16")
    lengths = cumulative([length], "cuda")
    call = AttentionCall("thd", "padding_causal", lengths, lengths, None, None, length, length)
    inputs = [one.requires_grad_() for one in operands(length, length, layer, dtype=dtype, device="cuda")]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kernel(*inputs, call).sum().backward()
    scores = layer.num_heads * length**2 * dtype.itemsize
    assert torch.cuda.max_memory_allocated() - before < scores / 4


@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
def test_masks_are_no_reason_for_plain_operations(heads):
    layer = spec(True, None, 64, 32, *heads)
    assert_computes_masks(kernel_of("sdpa", layer), layer, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_strided_rows_and_no_query(dtype):
    layer = spec()
    assert_computes_strided_rows(kernel_of("sdpa", layer), layer, "cuda", dtype)
