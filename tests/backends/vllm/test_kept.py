"""What layers keep after an update, as vllm-ascend's keep it: right, and wrong in the ways that others have met.

With vLLM these tests use its own reloading; without it, a stand-in (``tests/fake_vllm_reload.py``).
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from anytron.base.errors import EngineError
from anytron_vllm.installation import find_installation
from tests.fake_vllm_reload import stand_in
from tests.transposing_model import build, difference, random_weights

WITH_VLLM = find_installation() is not None
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own, and those of what it imports


@pytest.fixture
def transfer(monkeypatch):
    """The module with the worker's methods."""
    with nullcontext() if WITH_VLLM else stand_in(monkeypatch):
        from anytron_vllm import transfer as module

        monkeypatch.setattr(module, "set_current_vllm_config", lambda config: nullcontext())
        yield module


@pytest.fixture
def worker(transfer):
    """A worker that has had one update."""
    made = build()
    made.update(random_weights(1))
    return made


def test_after_each_update_layers_compute_with_the_new_weights(worker):
    for seed in (2, 3, 4):
        worker.update(random_weights(seed))
        assert difference(worker.model, random_weights(seed)) < 1e-4
        assert difference(worker.model, random_weights(seed - 1)) > 0.1


def process_again(transfer, monkeypatch):
    """Process experts again that vLLM has processed, as ms-swift did before its #9828."""
    finalize = transfer.finalize_layerwise_reload

    def mutant(model, config):
        finalize(model, config)
        model.experts.quant_method.process_weights_after_loading(model.experts)

    monkeypatch.setattr(transfer, "finalize_layerwise_reload", mutant)


def test_experts_that_were_transposed_twice_are_named(worker, transfer, monkeypatch):
    process_again(transfer, monkeypatch)
    with pytest.raises(EngineError, match=r"(?s)no longer keeps its weights.*experts\.w13_weight.*another tensor"):
        worker.update(random_weights(2))


def test_without_the_check_nothing_would_say_so(worker, transfer, monkeypatch):
    """The mutant is one: the square weights have the right shape, and the model computes something else."""
    process_again(transfer, monkeypatch)
    monkeypatch.setattr(transfer, "check_places", lambda model, before: None)
    worker.update(random_weights(2))
    layer = worker.model.experts
    layer.w2_weight = torch.nn.Parameter(layer.w2_weight.transpose(1, 2), requires_grad=False)  # else shapes show it
    assert difference(worker.model, random_weights(2)) > 0.1


@pytest.mark.parametrize("name", ["w13_weight", "w2_weight"])
def test_experts_that_were_transposed_between_updates_are_named(worker, name):
    """As ``NPUWorker.wake_up`` of vllm-ascend 0.23 to 0.26 does (its issue #12226)."""
    layer = worker.model.experts
    setattr(layer, name, torch.nn.Parameter(getattr(layer, name).transpose(1, 2), requires_grad=False))
    with pytest.raises(EngineError, match=rf"(?s)experts\.{name}.*has transposed it"):
        worker.update(random_weights(2))


def test_latent_attention_with_parts_of_old_weights_is_named(worker, monkeypatch):
    monkeypatch.setattr(worker.model.attention.impl, "process_weights_after_loading", lambda: None)
    with pytest.raises(EngineError, match=r"(?s)computes with other weights.*attention\.W_UK_T"):
        worker.update(random_weights(2))


def test_latent_attention_with_one_wrong_part_is_named(worker, monkeypatch):
    parts = worker.model.attention.impl
    process = parts.process_weights_after_loading

    def mutant():
        process()
        parts.W_UV[1, 2, 3] += 1.0

    monkeypatch.setattr(parts, "process_weights_after_loading", mutant)
    with pytest.raises(EngineError, match=r"(?s)computes with other weights.*attention\.W_UV"):
        worker.update(random_weights(2))


def test_a_projection_that_was_freed_takes_no_new_weights(worker):
    """As vllm-ascend's sparse attention frees it (``dispose_layer`` in vllm_ascend/attention/sfa_v1.py)."""
    weight = worker.model.attention.kv_b_proj.weight
    weight.set_(torch.empty(0))
    with pytest.raises(RuntimeError, match="size of tensor"):
        worker.update(random_weights(2))


def test_a_lost_tensor_is_named(worker):
    weights = random_weights(2)
    del weights["experts.1.w3"]
    with pytest.raises(EngineError, match=r"(?s)did not load all weights.*experts"):
        worker.update(weights)
