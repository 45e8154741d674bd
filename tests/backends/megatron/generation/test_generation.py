"""What the policy generates on its training ranks, against Hugging Face and against its own forward pass.

The engine ``transformers`` draws with the same numbers. So where both compute the same probabilities, with prompts of
different lengths beside each other, all tokens are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from anytron.proof.verification.weights import stored_weights
from anytron.run.trainer.updates import UpdatePlan
from anytron.sequences.batch import RaggedBatch
from anytron.workers.engines.rollout_engine import GenerationRequest, PromptInputs, SamplingParams
from anytron_conformance.tiny_models import CONFIGS
from anytron_megatron.models.families import FAMILIES
from tests.backends.megatron.families.layouts import (
    EP2,
    ONE,
    ONE_PADDED,
    PP2,
    TP2,
    TP2_EP2,
    VPP2,
    WITH_CACHE,
    Layout,
)
from tests.backends.megatron.families.published import PUBLISHED
from tests.backends.rollout.conftest import engine_for, run_config, write_weights

LENGTHS = (1, 2, 2, 3, 5, 7, 11)
TEMPERATURE = 0.8
ENDS = tuple(range(0, 120, 11))
DP2_PP2 = Layout("DP2, PP2", {"data_parallel_size": 2, "pipeline_model_parallel_size": 2})


@dataclass(frozen=True)
class Case:
    """A tiny model in a layout.

    Attributes:
        model: Key of ``anytron_conformance.tiny_models.CONFIGS``, or a published configuration.
        layout: How it is split.
        slow: Left to ``tox -e slow``.
        sampling: Besides the length, the temperature and the end tokens.
    """

    model: str
    layout: Layout
    slow: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def marks(self) -> list[str]:
        """Which run it is left to, besides the normal suite."""
        return ["families"] if self.model in PUBLISHED else ["slow"] if self.slow else []


CASES = (
    Case("qwen3", ONE, sampling={"top_k": 20, "min_new_tokens": 3}),
    Case("qwen3", ONE_PADDED, slow=True, sampling={"top_p": 0.7}),
    Case("qwen3", TP2),
    Case("qwen3", PP2),
    Case("qwen3", VPP2, slow=True),
    Case("qwen3", DP2_PP2, slow=True),
    Case("qwen3_tied", TP2, slow=True),
    Case("qwen3_tied", PP2, slow=True),
    Case("qwen2", ONE),
    Case("qwen2_5", TP2, slow=True),
    Case("llama", ONE),
    Case("llama", PP2, slow=True),
    Case("qwen3_moe", EP2),
    Case("qwen3_moe", TP2_EP2),
    Case("qwen3_moe", PP2, slow=True),
    Case("deepseek_v3", EP2),
    Case("deepseek_v3", ONE_PADDED, slow=True),
    Case("deepseek_v3", PP2, slow=True),
    *(Case(model, ONE) for model in WITH_CACHE),
)


def requests_for(count=28, vocabulary=119, **sampling) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in LENGTHS]
    params = SamplingParams(**({"max_new_tokens": 9, "temperature": TEMPERATURE, "end_token_ids": ENDS} | sampling))
    return [
        GenerationRequest(n, PromptInputs(tuple(prompts[n % len(prompts)])), params, seed=1000 + n)
        for n in range(count)
    ]


def generated(workers, requests):
    """What the ranks answer; each response once."""
    workers.group.call("submit", requests)
    found = {}
    while len(found) < len(requests):
        answers = [one for answer in workers.group.call("poll", 1.0) for one in answer]
        assert answers
        assert not found.keys() & dict(answers).keys()
        found |= dict(answers)
    return found


def trajectories(requests, found) -> tuple[RaggedBatch, torch.Tensor]:
    """The batch to score, and the log-probs that generation gave."""
    sequences = [[*request.prompt.tokens, *found[request.id].tokens] for request in requests]
    prompts = [len(request.prompt.tokens) for request in requests]
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    places = torch.cat([torch.arange(int(length)) for length in lengths])
    response = places >= torch.tensor(prompts).repeat_interleave(lengths)
    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    batch = RaggedBatch(lengths, tokens, response, temperature=TEMPERATURE)
    return batch, torch.tensor([value for request in requests for value in found[request.id].log_probs])


@pytest.fixture(scope="session")
def hugging_face(tiny_family, tmp_path_factory):
    """Responses of the engine ``transformers`` over a tiny model."""

    def responses(model, requests):
        directory = tiny_family(model)
        tokenizer = {"path": str(directory), "dtype": "float32", "tokenizer": "sort_digits.py:tokenizer"}
        engine = engine_for(run_config(model=tokenizer, max_batch_size=64))
        file = tmp_path_factory.mktemp("hugging_face") / "weights.safetensors"
        engine.load_weights(write_weights(file, stored_weights(directory)))
        engine.submit(requests)
        return dict(engine.poll(1.0))

    return responses


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=f"{case.model}-{case.layout.name}", marks=[getattr(pytest.mark, one) for one in case.marks]
        )
        for case in CASES
    ],
)
def test_tokens_are_those_of_transformers_and_log_probs_those_of_training(case, ranks, tiny_family, hugging_face):
    layout, requests = case.layout, requests_for(**case.sampling)
    workers, config = ranks.engine(
        tiny_family(case.model),
        parallel=layout.parallel,
        engine=layout.engine,
        rollout={"engine": "megatron", "max_batch_size": 12},
    )

    found = generated(workers, requests)

    expected = hugging_face(case.model, requests)
    assert len({len(one.tokens) for one in found.values()}) > 3, "the batch must be ragged, or the test shows little"
    assert {one.stop_reason for one in found.values()} == {"stop", "length"}
    for number, response in expected.items():
        assert found[number].tokens == response.tokens
        assert found[number].stop_reason == response.stop_reason
        assert set(found[number].versions) == {0}
        difference = torch.tensor(found[number].log_probs) - torch.tensor(response.log_probs)
        assert difference.abs().max() <= 1e-5
    batch, log_probs = trajectories(requests, found)
    scored = workers.score(batch, UpdatePlan.from_config(config, workers.topology[0]), "policy")
    assert (scored[batch.response_mask] - log_probs).abs().max() <= 1e-5


def test_the_families_are_those_that_claim_a_cache():
    proved = {(PUBLISHED.get(case.model) or CONFIGS[case.model])["model_type"] for case in CASES}
    assert {name for name, family in FAMILIES.items() if "cache" in family.proof} == proved


def test_replicas_that_share_experts_wait_for_each_other(ranks, tiny_family, hugging_face):
    """One response, of one replica: the other one takes part with its experts only."""
    workers, _ = ranks.engine(
        tiny_family("qwen3_moe"), parallel=EP2.parallel, engine=EP2.engine, rollout={"engine": "megatron"}
    )
    (request,) = requests_for(1)
    expected = hugging_face("qwen3_moe", [request])
    assert generated(workers, [request])[0].tokens == expected[0].tokens


def test_requests_that_were_given_up_are_not_generated(ranks, tiny_family):
    workers, _ = ranks.engine(tiny_family("qwen3"), parallel={"data_parallel_size": 2}, rollout={"engine": "megatron"})
    requests = requests_for(8)
    workers.group.call("submit", requests)
    aborted = [one for answer in workers.group.call("abort", [2, 3, 99]) for one in answer]
    assert [(number, response.tokens, response.stop_reason) for number, response in aborted] == [
        (number, (), "abort") for number, _ in aborted
    ]
    assert {number for number, _ in aborted} == {2, 3}
    finished = {number for answer in workers.group.call("poll", 1.0) for number, _ in answer}
    assert finished == {0, 1, 4, 5, 6, 7}
    assert workers.group.call("poll", 1.0) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout", "lora"),
    [
        ("qwen3_moe", TP2_EP2, None),
        pytest.param("qwen3", replace(PP2, engine={"recompute": "full"}), None, marks=pytest.mark.slow),
        pytest.param("qwen3", TP2, {"rank": 4, "dropout": 0.1}, marks=pytest.mark.slow),
    ],
    ids=["experts", "recompute", "lora"],
)
def test_training_goes_on_as_if_nothing_had_been_generated(
    model, layout, lora, ranks, tiny_family, recorded, policy_loss, tmp_path
):
    def train(*, generates):
        workers, config = ranks.engine(
            tiny_family(model),
            model={"lora": lora},
            parallel=layout.parallel,
            engine=layout.engine,
            optimizer={"lr": 0.1},
            rollout={"engine": "megatron"},
        )
        updates = UpdatePlan.from_config(config, workers.topology[0])
        scores, norms = [], []
        for version in range(3):
            if generates:
                requests = requests_for(9, vocabulary=96)
                found = generated(workers, requests)
                assert {seen for one in found.values() for seen in one.versions} == {version}
                batch, log_probs = trajectories(requests, found)
                scored = workers.score(batch, updates, "policy")
                assert (scored[batch.response_mask] - log_probs).abs().max() <= 1e-5
            scores.append(workers.score(recorded, updates, "policy"))
            norms.append(workers.update(recorded, updates, policy_loss)["grad_norm"])
        workers.export_weights(str(tmp_path / "weights.safetensors"))
        return torch.stack(scores), norms, load_file(tmp_path / "weights.safetensors")

    scores, norms, weights = train(generates=False)
    assert (scores[2] - scores[0]).abs().max() > 1e-3, "updates that move nothing would hide a difference"

    with_scores, with_norms, with_weights = train(generates=True)

    assert torch.equal(with_scores, scores)
    assert with_norms == norms
    assert [name for name, value in weights.items() if not torch.equal(value, with_weights[name])] == []
