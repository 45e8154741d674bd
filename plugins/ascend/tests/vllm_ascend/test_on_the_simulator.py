"""What vLLM's worker on an NPU needs of torch_npu, and Anytron's update of weights there, with vLLM's part stood in."""

from __future__ import annotations

import pytest
import torch

from anytron.base.errors import EngineError
from tests.fake_vllm_reload import stand_in
from tests.transposing_model import build, difference, random_weights


@pytest.fixture
def worker(monkeypatch):
    """A worker on the NPU that has had one update."""
    with stand_in(monkeypatch):
        made = build("npu:0")
        made.update(random_weights(1))
        yield made


def test_layers_on_an_npu_compute_with_the_weights_of_each_update(worker):
    assert worker.model.experts.w13_weight.device.type == "npu"
    for seed in (2, 3):
        worker.update(random_weights(seed))
        assert difference(worker.model, random_weights(seed)) < 1e-4


def test_experts_on_an_npu_that_were_transposed_are_named(worker):
    layer = worker.model.experts
    layer.w13_weight = torch.nn.Parameter(layer.w13_weight.transpose(1, 2), requires_grad=False)
    with pytest.raises(EngineError, match=r"(?s)experts\.w13_weight.*has transposed it"):
        worker.update(random_weights(2))


def test_a_freed_projection_on_an_npu_takes_no_new_weights(worker):
    worker.model.attention.kv_b_proj.weight.set_(torch.empty(0, device="npu"))
    with pytest.raises(RuntimeError, match="size of tensor"):
        worker.update(random_weights(2))


@pytest.mark.parametrize("vocabulary", [7, 1000, 151936])
def test_a_draw_moves_a_generator_by_the_four_that_vllm_ascend_sets_it_back(vocabulary):
    """Otherwise tokens would depend on the parts in which a prompt was computed."""
    generator = torch.Generator(device="npu")
    generator.manual_seed(5)
    row = torch.empty(vocabulary, device="npu")
    first = row.exponential_(generator=generator).clone()
    assert generator.get_offset() == 4
    generator.set_offset(generator.get_offset() - 4)
    assert torch.equal(row.exponential_(generator=generator), first)
