"""The experts of tokens as vLLM gives them, in each version's own types (recorded by vLLM itself: test_families.py)."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from anytron_vllm.routing import RecordedRouting
from anytron_vllm.start import RECORDED_ROUTING
from tests.needs_vllm import NEEDS_VLLM

pytestmark = NEEDS_VLLM
NAMES = ["model.layers.0.mlp.up_proj.weight"] + [
    f"model.layers.{layer}.mlp.experts.{name}" for layer in (10, 2) for name in ("down_proj", "gate_up_proj")
]


def rows(tokens, first, dtype):
    """Experts of 3 in 11 layers: number 100 x layer + token; dense layers hold zeros."""
    found = np.zeros((tokens, 11, 3), dtype)
    for layer in (2, 10):
        found[:, layer] = 100 * layer + first + np.arange(tokens)[:, None]
    return found


@pytest.mark.parametrize(("experts", "told", "kept"), [(256, np.uint8, torch.uint8), (2000, np.uint16, torch.int16)])
def test_layers_with_experts_are_taken_in_order_from_ended_and_from_running_responses(experts, told, kept):
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.output_processor import OutputProcessor

    processor = OutputProcessor(None, log_stats=False)
    engine = SimpleNamespace(output_processor=processor, model_config=SimpleNamespace(get_num_experts=lambda: experts))
    routing = RecordedRouting(engine, NAMES)
    layers = torch.tensor([200, 1000]) if experts > 256 else torch.tensor([200, 1000]) % 256
    expected = (layers[None] + torch.arange(6)[:, None])[..., None].expand(6, 2, 3).to(kept)

    output = CompletionOutput(0, "", [1], None, None, routed_experts=rows(6, 0, told))
    assert torch.equal(routing.of_ended(output), expected)
    assert routing.of_ended(CompletionOutput(0, "", [1], None, None)) is None

    processor.external_req_ids["7"].append("7-a1")
    processor.request_states["7-a1"] = SimpleNamespace(routed_experts_chunks=[rows(5, 0, told), rows(1, 5, told)])
    assert torch.equal(routing.of_running("7"), expected)
    processor.request_states["7-a1"].routed_experts_chunks.clear()
    assert routing.of_running("7") is None


def test_vllm_knows_the_argument_and_the_attributes():
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.output_processor import RequestState

    assert {field.name for field in dataclasses.fields(EngineArgs)} >= RECORDED_ROUTING.keys()
    assert "routed_experts_chunks" in RequestState.__init__.__code__.co_names
