"""The routing of the rollout, replayed in training: families beyond those of ``test_rollout_routing.py``, in float32.

The oracle is the family's code in transformers, in which only the result of ``topk`` in each router is replaced.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from anytron.proof.verification.gradients import computed_gradients
from anytron.proof.verification.hugging_face import expected_gradients
from tests.backends.megatron.experts.test_rollout_routing import rolled_out_by
from tests.backends.megatron.families.layouts import EVERY_MODEL, TP2_EP2, WITH_REPLAY
from tests.backends.megatron.families.observe import largest, relative_difference

pytestmark = pytest.mark.families

MODELS = [model for model in EVERY_MODEL if model.name in (*WITH_REPLAY, "qwen3_next")]
every_model = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)


def layers_with_experts(directory):
    """How many layers of a model have a router, by its files."""
    names = load_file(directory / "model.safetensors")
    return len({name.split(".layers.")[1].split(".")[0] for name in names if ".experts." in name})


@pytest.fixture(scope="module")
def truth_of(tiny_family, recorded, recorded_images):
    """What transformers computes with experts drawn at random, and the trajectories that have them."""

    truths = {}

    def truth(model):
        if model.name not in truths:
            truths[model.name] = computed(model)
        return truths[model.name]

    def computed(model):
        batch = recorded_images if model.family.takes_images else recorded
        directory = tiny_family(model.name)
        shape = batch.num_tokens, layers_with_experts(directory), 4
        scores = torch.rand(shape, generator=torch.Generator().manual_seed(7))
        routing = scores.topk(2).indices.to(torch.uint8)
        routing[batch.lengths.cumsum(0) - 1] = 0  # a rollout has no row for the last token
        found = [
            expected_gradients(directory, None, torch.float32, dataclasses.replace(batch, routing=one))
            for one in (routing, None)
        ]
        return found[0], found[1].log_probs

    return truth


@pytest.fixture
def compute(start_engine, tiny_family, truth_of):
    """Score a family's trajectories with their experts, recomputed on two ranks, and compute gradients."""

    def run(model, batch=None):
        truth, _ = truth_of(model)
        batch = truth.batch if batch is None else batch
        with start_engine(
            model={"path": str(tiny_family(model.name))},
            rollout={"replay_routing": True},
            engine={"recompute": "full", "max_tokens_per_micro_batch": batch.num_tokens // 3 + 3},
            parallel=TP2_EP2.parallel,
        ) as (workers, updates, output):
            log_probs = workers.token_outputs(batch, updates, "policy").log_probs
            gradients, _ = computed_gradients(workers, updates, batch, output)
        response = batch.response_mask
        # A tower that gets no images has no gradients.
        expected = {name: right for name, right in truth.gradients.items() if name in gradients or right.any()}
        return largest((log_probs - truth.log_probs) * response), relative_difference(gradients, expected)

    return run


@every_model
def test_training_computes_with_the_experts_of_the_rollout(model, compute):
    log_probs, gradients = compute(model)
    assert log_probs <= 1e-5
    assert gradients <= 1e-4


@every_model
def test_the_experts_that_are_forced_are_not_the_routers_own(model, truth_of):
    """Otherwise agreement would prove nothing."""
    truth, unforced = truth_of(model)
    assert largest((truth.log_probs - unforced) * truth.batch.response_mask) > 1e-3


@pytest.mark.parametrize("model", [model for model in MODELS if model.name in ("gpt_oss", "ernie4_5_moe")])
def test_routing_that_is_one_token_off_is_noticed(model, compute, truth_of):
    batch = truth_of(model)[0].batch
    starts = batch.lengths.cumsum(0) - batch.lengths
    before = torch.arange(len(batch.tokens)) - 1
    before[starts] = starts  # of the same sequence: the last token of another has no routing
    log_probs, gradients = compute(model, dataclasses.replace(batch, routing=batch.routing[before]))
    assert log_probs > 1e-3
    assert gradients > 1e-2


@every_model
def test_the_engine_transformers_tells_what_megatron_would_choose(
    model, start_engine, tiny_family, policy_loss, tmp_path
):
    """With the same weights in float32 both choose alike, so that the replay changes nothing."""
    directory = tiny_family(model.name)
    batch = rolled_out_by(directory, "float32", tmp_path)
    with start_engine(
        model={"path": str(directory)},
        rollout={"replay_routing": True},
        engine={"max_tokens_per_micro_batch": 512},
    ) as (workers, updates, _):
        metrics = workers.update(batch, updates, policy_loss)
    assert metrics["moe/rerouted_fraction"] == 0.0
    assert metrics["rollout/log_prob_abs_diff"] <= 1e-5
