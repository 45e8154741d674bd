"""Losses that look at whole sequences have the right gradients, however their tokens are spread over ranks.

Each layout is built once, and computes the gradients of every loss. Expected ones come of Hugging Face's model in
float64 and of the papers' formulas, sequence by sequence (:mod:`tests.algorithm_oracle`).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from anytron.algorithms.policy_loss import PolicyLoss
from anytron.config.algorithm import AlgorithmSection
from anytron.run.trainer.updates import UpdatePlan
from tests import algorithm_oracle
from tests.core.algorithms.test_importance import measured

DP2, CP2 = {"data_parallel_size": 2}, {"context_parallel_size": 2}
WHOLE = {"max_tokens_per_micro_batch": 4096}
LAYOUTS = {
    "one micro-batch": {"engine": WHOLE},
    "micro-batches": {},
    "rows": {"engine": {"sequence_format": "bshd"}},
    "dp2": {"parallel": DP2},
    "cp2": {"parallel": CP2},
    "cp2, one micro-batch": {"parallel": CP2, "engine": WHOLE},
    "tp2": {"parallel": {"tensor_model_parallel_size": 2}},
}
TERMS = {"entropy_coefficient": 0.1, "kl_coefficient": 0.1, "clip_low": 0.1, "clip_high": 0.15}
SEQUENCES = {"importance_level": "sequence", "importance_floor": 0.7, "importance_cap": 1.5}
CASES = {
    "ppo_clip": {"dual_clip": 1.2},
    "gspo": {"loss": "gspo", "aggregation": "sequence-mean"},
    "gspo_token": {"loss": "gspo_token", "aggregation": "length-constant", "length_constant": 9},
    "cispo": {"loss": "cispo", "aggregation": "token-sum"},
    "sapo": {"loss": "sapo", "importance_correction": "truncated"},
    "truncated sequences": {"importance_correction": "truncated", **SEQUENCES},
    "masked sequences": {"loss": "gspo", "importance_correction": "masked", **SEQUENCES},
}


def settings(case):
    return AlgorithmSection(**{**TERMS, **CASES[case]})


@pytest.fixture(scope="module")
def hf_model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64).eval()


def scores(model, batch):
    """Log-probs and entropies of a batch's tokens, float64 ``[T]``, with gradients."""
    log_probs, entropies = [], []
    for tokens in batch.tokens.split(batch.lengths.tolist()):
        full = (model(tokens[None]).logits[0, :-1] / batch.temperature).log_softmax(-1)
        log_probs += [full.new_zeros(1), full.gather(1, tokens[1:, None])[:, 0]]
        entropies += [full.new_zeros(1), -(full.exp() * full).sum(-1)]
    return torch.cat(log_probs), torch.cat(entropies)


@pytest.fixture(scope="module")
def off_policy(hf_model, recorded):
    """Trajectories whose old policy, reference and rollout are a little off, whole responses some more than others."""
    with torch.no_grad():
        log_probs, _ = scores(hf_model, recorded)
    generator = torch.Generator().manual_seed(7)

    def near(of_tokens, of_sequences):
        shift = of_sequences * torch.randn(recorded.num_sequences, generator=generator)
        noise = of_tokens * torch.randn(recorded.num_tokens, generator=generator)
        found = log_probs + noise + torch.repeat_interleave(shift, recorded.lengths)
        return torch.where(recorded.response_mask, found, 0.0).float()

    return replace(
        recorded,
        old_log_probs=near(0.15, 0.1),
        reference_log_probs=near(0.2, 0.1),
        rollout_log_probs=near(0.15, 0.1),
    )


def planned(batch, algorithm):
    plan = UpdatePlan(1, 1, algorithm.aggregation, 24, length_constant=algorithm.length_constant or 1)
    (mini_batch,) = plan.mini_batches(batch, seed=0)
    return mini_batch.batch


@pytest.fixture(scope="module")
def expected(hf_model, off_policy):
    """The loss and its gradients by parameter, for each case."""
    found = {}
    for case in CASES:
        algorithm = settings(case)
        hf_model.zero_grad()
        loss = algorithm_oracle.policy_loss(off_policy, *scores(hf_model, off_policy), algorithm.model_dump())
        loss.backward()
        found[case] = {name: parameter.grad.float() for name, parameter in hf_model.named_parameters()}
    return found


@pytest.fixture(scope="module")
def differences(start_engine, off_policy, expected):
    """Compute the gradients of some cases in a layout; give the largest difference of each, relative to the largest."""

    def compute(sections, cases=tuple(CASES)):
        found = {}
        with start_engine(**sections) as (workers, plan, output):
            for case in cases:
                file, algorithm = output / "gradients.safetensors", settings(case)
                workers.export_gradients(str(file), planned(off_policy, algorithm), plan, PolicyLoss(algorithm))
                gradients = load_file(file)
                assert gradients.keys() == expected[case].keys()
                found[case] = max(
                    float((gradients[name] - right).abs().max() / right.abs().max())
                    for name, right in expected[case].items()
                )
        return found

    return compute


@pytest.mark.some(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_the_papers_in_every_layout(layout, differences):
    found = differences(LAYOUTS[layout])
    assert max(found.values()) < 2e-4, found


BLIND = """
import torch
from anytron import hookimpl

class Plugin:
    name = "sabotage"

    @hookimpl
    def postprocess_output(self, values, layout):
        def gather(slots):
            parts = [torch.zeros_like(slots)] * layout.shard.size
            parts[layout.shard.rank] = slots
            return torch.cat(parts)

        return layout.unpack(values, gather)
"""


@pytest.mark.slow
def test_a_rank_that_sees_its_own_tokens_only_is_noticed(install_plugin, differences):
    """A loss of tokens has the same gradient then; that of a sequence has not."""
    install_plugin(BLIND)
    found = differences({"parallel": CP2}, ["gspo", "cispo"])
    assert found["cispo"] < 2e-4
    assert found["gspo"] > 1e-2


@pytest.mark.parametrize("layout", ["micro-batches", "dp2", "cp2"])
def test_metrics_that_are_no_sums_are_those_of_the_whole_mini_batch(layout, start_engine, hf_model, off_policy):
    with torch.no_grad():
        log_probs, entropy = scores(hf_model, off_policy)
    algorithm = AlgorithmSection(importance_correction="measured", importance_level="sequence")
    numbered = replace(off_policy, tokens=torch.arange(off_policy.num_tokens))  # measured() takes outputs by token
    wanted = measured(numbered, log_probs, entropy, 4096, 1, importance_level="sequence")
    with start_engine(**LAYOUTS[layout]) as (workers, plan, _):
        found = workers.update(planned(off_policy, algorithm), plan, PolicyLoss(algorithm))
    assert {name for name in wanted if name.startswith("rollout/")} <= found.keys()
    for name in wanted:
        if name.startswith("rollout/"):
            assert found[name] == pytest.approx(wanted[name], rel=1e-4), name
