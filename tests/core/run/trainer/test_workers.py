"""Work goes to the right copy of the model and its results come back to the right tokens."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from anytron.algorithms.losses import ValueLoss
from anytron.algorithms.policy_loss import PolicyLoss
from anytron.base.errors import EngineError
from anytron.config.algorithm import AlgorithmSection
from anytron.record.checkpoint.manifest import FileRecord
from anytron.run.trainer.updates import UpdatePlan
from anytron.run.trainer.workers import TrainingWorkers, kernel_suppliers
from anytron.sequences.batch import RaggedBatch, TokenOutputs
from anytron.workers.engines.training_engine import Topology


@dataclass
class Rank:
    """A rank whose log-prob of a token is minus its id, and its experts the id, so that every value says its place."""

    place: Topology

    def topology(self):
        return self.place

    def score(self, micro_batches, role):
        self.seen = [batch.tokens.tolist() for batch in micro_batches]
        scale = {"policy": -1.0, "reference": -2.0}[role]
        scores = [
            TokenOutputs(scale * batch.tokens, torch.zeros(batch.num_tokens), routing=routing_of(batch.tokens))
            for batch in micro_batches
        ]
        for batch, outputs in zip(micro_batches, scores, strict=True):
            if batch.is_filler:  # its sequence may have other rounding errors than elsewhere
                outputs.log_probs.fill_(99)
        return scores if self.place.reports else None

    def values(self, micro_batches):
        self.seen = [batch.tokens.tolist() for batch in micro_batches]
        values = [(99 if batch.is_filler else 0.5) * batch.tokens for batch in micro_batches]
        return values if self.place.reports else None

    def written_files(self, *, wait):
        return {f"part-{self.place.dp_rank}-{self.place.reports}": FileRecord(1, "ab")} if wait else None

    def update_critic(self, micro_batches, loss):
        weight = sum(batch.loss_weights.sum().item() for batch in micro_batches)
        metrics = {"critic/weight": weight, "grad_norm": 4.0, "lr": 0.25, "update/skipped": 0.0}
        return metrics if self.place.reports else None

    def update(self, micro_batches, loss):
        self.seen = [batch.tokens.tolist() for batch in micro_batches]
        weight = sum(batch.loss_weights.sum().item() for batch in micro_batches)
        metrics = {"weight": weight, "grad_norm": 3.0, "lr": 0.5, "update/skipped": 1.0}
        return metrics if self.place.reports else None


def routing_of(tokens):
    """Two layers, two experts for each token."""
    return torch.stack([tokens, tokens + 1, tokens + 2, tokens + 3], dim=1).view(-1, 2, 2).to(torch.int16)


@dataclass
class Group:
    ranks: list

    @property
    def size(self):
        return len(self.ranks)

    def call(self, method, *args, **kwargs):
        return [getattr(rank, method)(*args, **kwargs) for rank in self.ranks]

    def scatter(self, method, shares):
        answers = {rank: getattr(self.ranks[rank], method)(*args) for ranks, args in shares for rank in ranks}
        return [answers[rank] for rank in range(self.size)]


@pytest.fixture
def workers():
    """Two replicas of a two-rank model; ranks of a replica are not neighbours, the second one reports."""
    places = [Topology(dp_rank=rank % 2, dp_size=2, reports=rank >= 2) for rank in range(4)]
    return TrainingWorkers.of(Group([Rank(place) for place in places]))


@pytest.fixture
def batch():
    lengths = torch.tensor([4, 9, 2, 7, 3])
    tokens = torch.arange(int(lengths.sum()))
    return RaggedBatch(lengths, tokens, torch.ones(tokens.numel(), dtype=torch.bool))


def plan(max_tokens=9, **changes):
    return UpdatePlan(**({"epochs": 1, "count": 1} | changes), aggregation="token-mean", max_tokens=max_tokens)


@pytest.mark.parametrize("max_tokens", [1, 9, 1000])
def test_every_token_gets_its_own_score(workers, batch, max_tokens):
    scores = workers.score(batch, plan(max_tokens), "policy")
    assert torch.equal(scores, -batch.tokens.float())


@pytest.mark.parametrize("rows", [-1, 1])
def test_results_of_the_wrong_length_are_refused(workers, batch, monkeypatch, rows):
    """Padding, for example: it would shift the results of all that follows, or be left out."""
    whole = Rank.values

    def wrong(self, micro_batches):
        values = whole(self, micro_batches)
        return values and [torch.nn.functional.pad(one, (0, rows)) for one in values]

    monkeypatch.setattr(Rank, "values", wrong)
    with pytest.raises(EngineError, match=r"wrong length.*\n.*rows for a micro-batch of \d+ tokens"):
        workers.with_values(batch, plan(9))


def test_a_batch_may_be_smaller_than_the_number_of_replicas(workers, batch):
    only = batch.select(torch.tensor([1]))
    assert torch.equal(workers.score(only, plan(), "policy"), -only.tokens.float())


@pytest.mark.parametrize("max_tokens", [1, 9, 1000])
def test_every_token_gets_its_own_value(workers, batch, max_tokens):
    assert torch.equal(workers.with_values(batch, plan(max_tokens)).values, 0.5 * batch.tokens)


def test_a_save_has_the_files_of_every_rank_or_is_not_over(workers):
    assert workers.written_files(wait=False) is None
    names = {"part-0-False", "part-1-False", "part-0-True", "part-1-True"}
    assert workers.written_files(wait=True) == dict.fromkeys(names, FileRecord(1, "ab"))


def test_the_critics_metrics_are_told_from_the_policys(workers, batch):
    (mini_batch,) = plan().mini_batches(batch, seed=0)
    metrics = workers.update_critic(mini_batch, plan(), ValueLoss())
    assert metrics == {
        "critic/weight": pytest.approx(1.0),
        "critic/grad_norm": 4.0,
        "critic/lr": 0.25,
        "critic/update/skipped": 0.0,
    }


@pytest.mark.parametrize("max_tokens", [1, 9, 1000])
def test_routing_follows_its_tokens_from_the_scoring_pass_into_other_micro_batches(workers, batch, max_tokens):
    replaying = plan(max_tokens, replays_scoring=True)
    assert replaying.needs_old_log_probs
    scored = workers.with_scores(batch, replaying, reference=False)
    assert torch.equal(scored.routing, routing_of(batch.tokens))
    assert scored.routing.dtype == torch.int16
    for mini_batch in plan(2, count=2).mini_batches(scored, seed=0):
        for share in plan(2).micro_batches(mini_batch, dp_size=2):
            for micro_batch in share:
                assert torch.equal(micro_batch.batch.routing, routing_of(micro_batch.batch.tokens))


def test_one_update_without_replay_needs_no_scoring_pass(workers, batch):
    scored = workers.with_scores(batch, plan(), reference=False)
    assert scored.old_log_probs is None
    assert scored.routing is None


def test_ranks_of_one_copy_see_the_same(workers, batch):
    workers.score(batch, plan(), "policy")
    first, second, third, fourth = workers.group.ranks
    assert first.seen == third.seen
    assert second.seen == fourth.seen
    assert first.seen != second.seen


def test_sums_are_added_over_copies_and_rank_values_are_not(workers, batch):
    (mini_batch,) = plan().mini_batches(batch, seed=0)
    metrics = workers.update(mini_batch, plan(), PolicyLoss(AlgorithmSection()))
    assert metrics == {"weight": pytest.approx(1.0), "grad_norm": 3.0, "lr": 0.5, "update/skipped": 1.0}


@pytest.mark.parametrize(
    ("changes", "kl", "old", "reference"),
    [
        ({}, 0.0, False, False),
        ({"epochs": 2}, 0.0, True, False),
        ({"count": 2}, 0.1, True, True),
        ({}, 0.1, False, True),
    ],
)
def test_only_the_scores_that_are_needed_are_computed(workers, batch, changes, kl, old, reference):
    scored = workers.with_scores(batch, plan(**changes), reference=kl > 0)
    assert (scored.old_log_probs is not None) == old
    assert (scored.reference_log_probs is not None) == reference
    if reference:
        assert torch.equal(scored.reference_log_probs, -2.0 * batch.tokens)


def test_the_suppliers_of_kernels_are_those_of_any_rank():
    """Only the last pipeline stage asks for a log-prob kernel; an engine of others may say nothing."""
    facts = [{"kernels": {"attention_kernel": "acme"}}, {}, {"kernels": {"log_prob_kernel": "neutral-default"}}]
    assert kernel_suppliers(facts) == {"attention_kernel": "acme", "log_prob_kernel": "neutral-default"}
