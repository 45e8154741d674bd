"""A prompt computed once for all of its samples gives the numbers of whole sequences; a wrong way of it does not."""

from __future__ import annotations

import pytest
import torch

from anytron.algorithms.losses import ValueLoss
from anytron.run.trainer.updates import UpdatePlan
from anytron.sequences.batch import RaggedBatch
from tests.backends.megatron.engine.test_agreement import differences

WHOLE = {"options": {"share_prompts": False}}
ALL_IN_ONE = {"max_tokens_per_micro_batch": 4096}
"""Samples of a prompt are found within a micro-batch."""
SPLITS = {
    "one rank": {},
    "recomputed": {"engine": {"recompute": "full"}},
    "small micro-batches": {"engine": {"max_tokens_per_micro_batch": 48}},
    "tp2-sp": {"parallel": {"tensor_model_parallel_size": 2}},
    "pp2-interleaved": {
        "parallel": {"pipeline_model_parallel_size": 2},
        "engine": {"options": {"virtual_pipeline_model_parallel_size": 2}},
    },
    "dp2": {"parallel": {"data_parallel_size": 2}},
}
PROMPTS, SAMPLES = ([1, 2, 3, 4, 5, 6, 7], [8, 9, 1, 2]), 4


@pytest.fixture(scope="module")
def grouped():
    """Two prompts with four samples each, and a sequence without siblings."""
    generator = torch.Generator().manual_seed(3)
    sequences = [(prompt, 3 + sample) for prompt in PROMPTS for sample in range(SAMPLES)] + [([11, 12, 13], 4)]
    lengths = torch.tensor([len(prompt) + count for prompt, count in sequences])
    tokens, written = [], []
    for prompt, count in sequences:
        tokens += [*prompt, *torch.randint(0, 97, (count,), generator=generator).tolist()]
        written += [False] * len(prompt) + [True] * count
    response = torch.tensor(written)

    def recorded_log_probs():
        return (-4.6 + 0.3 * torch.randn(len(tokens), generator=generator)) * response

    return RaggedBatch(
        lengths=lengths,
        tokens=torch.tensor(tokens),
        response_mask=response,
        rollout_log_probs=recorded_log_probs(),
        old_log_probs=recorded_log_probs(),
        reference_log_probs=recorded_log_probs(),
        advantages=torch.randn(len(sequences), generator=generator).repeat_interleave(lengths),
        values=torch.zeros(len(tokens)),
        returns=torch.randn(len(tokens), generator=generator),
        loss_weights=response / response.sum(),
        token_shares=response / response.sum(),
    )


@pytest.fixture(scope="module")
def whole(follow, grouped):
    return follow(grouped, engine={**ALL_IN_ONE, **WHOLE})


@pytest.mark.some(2)
@pytest.mark.parametrize("split", SPLITS)
def test_it_agrees_with_whole_sequences(split, whole, follow, grouped):
    sections = {**SPLITS[split], "engine": {**ALL_IN_ONE, **SPLITS[split].get("engine", {})}}
    found = differences(whole, follow(grouped, **sections))
    assert max(found.values()) <= 1e-5, found


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("target", "replacement"),
    [
        # The gradients of a prompt's copies are not added up; its keys are those of other tokens.
        (
            "anytron.sequences.shared_prompts:Repeats.collect",
            "lambda original: lambda self, copies: copies.index_select(0, self._single)",
        ),
        (
            "anytron.sequences.shared_prompts:Repeats.take",
            "lambda original: lambda self, rows: original(self, rows.roll(1, 0))",
        ),
        # Pieces begin at position 0.
        (
            "anytron.sequences.shared_prompts:Pieces.position_ids",
            "lambda original: lambda self, layout, context_length: layout.position_ids",
        ),
    ],
    ids=["gradients", "keys", "positions"],
)
def test_a_wrong_way_of_sharing_shows(target, replacement, whole, follow, grouped, write_extension):
    write_extension(target, replacement)
    assert max(differences(whole, follow(grouped, engine=ALL_IN_ONE)).values()) > 1e-3


def test_a_critic_gives_the_same_values(grouped, ranks, tiny_model):
    def values(**engine):
        critic = {"path": str(tiny_model), "optimizer": {"name": "sgd", "lr": 0.01, "clip_grad": 0.0}}
        engine = {**ALL_IN_ONE, **engine}
        workers, config = ranks.engine(tiny_model, critic=critic, algorithm={"advantage": "gae"}, engine=engine)
        updates = UpdatePlan.from_config(config, workers.topology[0])
        for _ in range(2):  # a head of zeros says the same of every state
            workers.update_critic(grouped, updates, ValueLoss(0.2))
        return workers.with_values(grouped, updates).values

    shared, expected = values(), values(**WHOLE)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(shared, expected, atol=1e-5, rtol=1e-5)
