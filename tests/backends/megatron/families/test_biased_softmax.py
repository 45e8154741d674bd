"""ERNIE-4.5 with experts, which a softmax and a bias choose: what the patches of its routers are for."""

import pytest
import torch
from safetensors.torch import load_file

from tests.backends.megatron.families.layouts import ONE, PUBLISHED_MODELS
from tests.backends.megatron.families.observe import beyond_bounds, compare, largest, observe

pytestmark = pytest.mark.families

(ERNIE,) = (model for model in PUBLISHED_MODELS if model.name == "ernie4_5_moe")
BIAS = "model.layers.1.mlp.moe_statics.e_score_correction_bias"
LOST = "lambda original: lambda self, scores, topk, groups, kept, choose: choose(scores, topk, groups, kept)"


def test_a_bias_that_does_not_choose_is_noticed(ranks, truth_of, tiny_family, policy_loss, write_extension, tmp_path):
    write_extension("anytron_megatron.patches.models:_Biased.get_replay_topk", LOST)
    truth = truth_of(ERNIE)
    one = observe(ranks, tiny_family(ERNIE.name), ONE, truth, policy_loss, tmp_path)
    figures = compare(one, one, truth)
    assert {"logits", "policy_gradients"} <= beyond_bounds(figures)
    assert figures.logits > 1e-2


def test_the_bias_follows_the_loads_of_experts_and_is_saved_as_it_was_published(
    ranks, tiny_family, truth_of, policy_loss, tmp_path
):
    before = load_file(tiny_family(ERNIE.name) / "model.safetensors")
    one = observe(ranks, tiny_family(ERNIE.name), ONE, truth_of(ERNIE), policy_loss, tmp_path)
    moved = one.after[BIAS] - before[BIAS]
    assert before[BIAS].shape == moved.shape == (1, 4)
    assert 0 < largest(moved) <= 3 * 1e-3 + 1e-6
    assert torch.equal(one.before[BIAS], before[BIAS])
