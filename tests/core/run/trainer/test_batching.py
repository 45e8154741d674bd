"""Division of sequences over ranks and micro-batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from anytron.run.trainer.experience import assemble
from anytron.run.trainer.updates import ReplicaBatches, UpdatePlan, micro_batches
from anytron.sequences.batch import RaggedBatch
from anytron.task.rewards.sample import Sample
from anytron.workers.engines.rollout_engine import Response
from anytron.workers.executor.channel import Call, decode, encode
from tests.core.run.trainer import differencing
from tests.core.sequences.test_encoding import batches, bits

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=30)


def tokens_of(part, sizes, padded=False):
    found = [sizes[index] for index in part]
    return len(found) * max(found, default=0) if padded else sum(found)


@settings(deadline=None)
@given(lengths, st.integers(1, 100), st.integers(1, 4), st.booleans(), st.integers(1, 3))
def test_micro_batches_keep_the_limit_and_are_equally_many(sizes, max_tokens, dp_size, padded, multiple):
    shares = micro_batches(sizes, max_tokens, dp_size, padded=padded, multiple=multiple)
    assert len(shares) == dp_size
    (count,) = {len(share) for share in shares}
    assert count % multiple == 0
    parts = [part for share in shares for part in share]
    assert sorted(index for part in parts for index in part) == list(range(len(sizes)))
    assert all(len(part) <= 1 or tokens_of(part, sizes, padded) <= max_tokens for part in parts)
    assert micro_batches(sizes, max_tokens, dp_size, padded=padded, multiple=multiple) == shares


@settings(deadline=None)
@given(lengths, st.integers(30, 200), st.integers(1, 4), st.booleans(), st.integers(1, 3))
@example([57, 52, 50, 45, 34, 33, 33, 30, 30, 29, 28, 28, 25, 20, 17], 128, 1, False, 2)
def test_differencing_needs_at_most_one_micro_batch_less(sizes, max_tokens, dp_size, padded, multiple):
    shares = micro_batches(sizes, max_tokens, dp_size, padded=padded, multiple=multiple)
    slow = differencing.micro_batches(sizes, max_tokens, dp_size, padded=padded, multiple=multiple)
    assert len(shares[0]) <= len(slow[0]) + multiple


def test_replicas_are_as_balanced_as_by_differencing():
    generator = torch.Generator().manual_seed(1)
    for dp_size, count, most, near in (
        (4, 256, 4096, 1.01),
        (8, 64, 4096, 1.01),
        (4, 24, 700, 1.01),
        (2, 8, 4096, 1.02),
    ):
        for _ in range(10):
            sizes = torch.randint(10, 500, (count,), generator=generator).tolist()
            found, slow = (
                max(sum(tokens_of(part, sizes) for part in share) for share in plan(sizes, most, dp_size))
                for plan in (micro_batches, differencing.micro_batches)
            )
            assert found <= max(slow, near * sum(sizes) / dp_size)


def test_the_time_of_a_plan_grows_with_the_sequences():
    """16,384 sequences on 64 replicas by differencing: more than eight minutes."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.empty(16384).log_normal_(7.0, 0.8, generator=generator).long().clamp(1, 8192).tolist()
    for padded in (False, True):
        shares = micro_batches(sizes, 16384, 64, padded=padded)
        work = [sum(tokens_of(part, sizes, padded) for part in share) for share in shares]
        assert max(work) <= 1.01 * sum(work) / 64
        assert len(shares[0]) * 64 <= 1.12 * sum(work) / 16384


def test_as_few_micro_batches_as_fit_into_the_limit():
    assert [len(share) for share in micro_batches([8] * 8, 32, 1)] == [2]
    assert [len(share) for share in micro_batches([8] * 8, 64, 1)] == [1]
    assert [len(share) for share in micro_batches([8] * 8, 16, 2)] == [2, 2]
    # Longest first into the emptiest gives 7 and 5; two parts of 6 there are.
    assert micro_batches([2, 2, 2, 3, 3], 6, 1) == [[[3, 4], [0, 1, 2]]]


def test_a_sequence_over_the_limit_stays_alone_and_the_others_are_balanced():
    ((alone, *others),) = micro_batches([900, 60, 40, 35, 25, 20, 20], 100, 1)
    assert alone == [0]
    assert sorted(tokens_of(part, [900, 60, 40, 35, 25, 20, 20]) for part in others) == [100, 100]


def batch_of(sizes, groups=None):
    total = sum(sizes)
    mask = torch.cat([torch.arange(size) > 0 for size in sizes])
    groups = None if groups is None else torch.tensor(groups)
    return RaggedBatch(torch.tensor(sizes), torch.arange(total), mask, groups=groups, advantages=torch.ones(total))


def test_groups_stay_together_and_every_pass_sees_each_once():
    plan = UpdatePlan(epochs=2, count=3, aggregation="token-mean", max_tokens=100)
    sizes = [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    batch = batch_of(sizes, [index // 2 for index in range(14)])
    passes = [mini_batch.lengths.tolist() for mini_batch in plan.mini_batches(batch, seed=0)]
    assert len(passes) == 6
    for one_pass in (passes[:3], passes[3:]):
        assert sorted(size for mini_batch in one_pass for size in mini_batch) == sizes
        for mini_batch in one_pass:
            assert all(second == first + 1 for first, second in zip(mini_batch[::2], mini_batch[1::2], strict=True))
    assert passes[:3] != passes[3:]
    assert [m.lengths.tolist() for m in plan.mini_batches(batch, seed=0)] == passes
    assert [m.lengths.tolist() for m in plan.mini_batches(batch, seed=1)] != passes


def test_the_weights_of_each_mini_batch_add_up_to_one():
    plan = UpdatePlan(epochs=1, count=3, aggregation="sequence-mean", max_tokens=100)
    for mini_batch in plan.mini_batches(batch_of([2, 3, 4, 5, 6, 7]), seed=0):
        assert mini_batch.batch.loss_weights.sum().item() == pytest.approx(1)
        assert mini_batch.batch.token_shares.sum().item() == pytest.approx(1)


def weights_of(batch, aggregation, constant):
    """The weights of all tokens of a mini-batch, float32 ``[T]`` each, by their definitions for single tokens."""
    mask, counts = batch.response_mask, batch.response_counts
    own = torch.repeat_interleave(counts, batch.lengths)
    each = {
        "token-mean": 1.0 / torch.full_like(own, int(mask.sum())).float(),
        "token-sum": torch.ones(len(own)),
        "sequence-mean": 1.0 / (own.clamp(min=1) * (counts > 0).sum()).float(),
        "length-constant": 1.0 / torch.full_like(own, len(counts) * constant).float(),
    }[aggregation]
    return each.where(mask, 0.0), mask.float() / int(mask.sum())


@settings(deadline=None)
@given(
    batches(),
    st.sampled_from(["token-mean", "token-sum", "sequence-mean", "length-constant"]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 30),
)
def test_ranks_get_the_bits_of_the_batch_and_the_weights_of_the_mini_batch(batch, aggregation, count, dp_size, most):
    assume(batch.response_mask.any() and not batch.is_filler)
    plan = UpdatePlan(2, count, aggregation, max_tokens=most, length_constant=7)
    for mini_batch in plan.mini_batches(batch, seed=0):
        weights, shares = weights_of(mini_batch.batch, aggregation, 7)
        wanted = replace(batch.select(mini_batch.sequences), loss_weights=weights, token_shares=shares)
        assert bits(mini_batch.batch) == bits(wanted)
        parts = [part for share in plan.micro_batches(mini_batch, dp_size) for part in share]
        assert sorted(one for part in parts if not part.is_filler for one in part.sequences) == list(
            range(mini_batch.num_sequences)
        )
        for share in plan.micro_batches(mini_batch, dp_size):
            here = ReplicaBatches(share)
            there = decode(encode(Call("update", (here,), {}))).args[0]
            assert len(there) == len(here)
            for part, held, arrived in zip(share, here, there, strict=True):
                own = wanted.select(torch.tensor(part.sequences))
                if part.is_filler:
                    nothing = torch.zeros(own.num_tokens)
                    own = replace(own, loss_weights=nothing, token_shares=nothing, is_filler=True)
                assert bits(held) == bits(arrived) == bits(own)


def test_images_stay_with_their_sequences_on_their_way_to_a_rank():
    batch = replace(batch_of([3, 4, 5]), images=("first", None, "third"))
    (share,) = UpdatePlan(1, 1, "token-mean", max_tokens=7).micro_batches(batch, dp_size=1)

    there = decode(encode(Call("score", (ReplicaBatches(share),), {}))).args[0]

    assert len(there) == 2
    pairs = [pair for part in there for pair in zip(part.lengths.tolist(), part.images, strict=True)]
    assert sorted(pairs) == [(3, "first"), (4, None), (5, "third")]


def test_groups_of_any_size_stay_together():
    plan = UpdatePlan(epochs=1, count=3, aggregation="token-mean", max_tokens=100)
    groups = [0, 0, 0, 2, 3, 3, 3, 3, 3, 4, 4]  # of group 1 nothing is left
    batch = batch_of([3] * len(groups), groups)
    seen = [mini_batch.batch.groups.tolist() for mini_batch in plan.mini_batches(batch, seed=0)]
    assert sorted(one for mini_batch in seen for one in mini_batch) == groups
    assert [len(set(mini_batch)) for mini_batch in seen] == [2, 1, 1]
    assert [m.batch.tokens.tolist() for m in plan.mini_batches(batch_of([3] * 11, groups), seed=0)] == [
        [token for token in range(33) if groups[token // 3] in mini_batch]
        if mini_batch == sorted(mini_batch)
        else [token for one in dict.fromkeys(mini_batch) for token in range(33) if groups[token // 3] == one]
        for mini_batch in seen
    ]


def test_fewer_groups_than_mini_batches_make_fewer_updates_and_fewer_sequences_than_ranks_are_filled_up():
    plan = UpdatePlan(epochs=2, count=4, aggregation="token-mean", max_tokens=100)
    batch = batch_of([3, 4, 5], [0, 0, 1])
    mini_batches = list(plan.mini_batches(batch, seed=0))
    assert sorted(mini_batch.num_sequences for mini_batch in mini_batches) == [1, 1, 2, 2]
    alone = next(mini_batch for mini_batch in mini_batches if mini_batch.num_sequences == 1)
    shares = plan.micro_batches(alone, dp_size=4)
    assert [len(share) for share in shares] == [1, 1, 1, 1]
    assert [share[0].batch.is_filler for share in shares] == [False, True, True, True]
    assert sum(float(share[0].batch.loss_weights.sum()) for share in shares) == pytest.approx(1.0)


def test_a_rank_without_work_gets_a_sequence_of_no_weight():
    plan = UpdatePlan(epochs=1, count=1, aggregation="token-mean", max_tokens=4)
    (mini_batch,) = plan.mini_batches(batch_of([9, 7, 8]), seed=0)
    shares = plan.micro_batches(mini_batch, dp_size=2)
    parts = [part for share in shares for part in share]
    assert [len(share) for share in shares] == [2, 2]
    fillers = [part for part in parts if part.batch.loss_weights.sum() == 0]
    assert [part.sequences for part in fillers] == [(1,)]
    assert fillers[0].batch.token_shares.sum() == 0
    assert [part.batch.is_filler for part in parts] == [part is fillers[0] for part in parts]
    assert sum(part.batch.loss_weights.sum().item() for part in parts) == pytest.approx(1)


def test_a_sequence_without_a_trained_token_is_no_filler():
    """Its tokens choose experts, and count behind expert biases, in a micro-batch of its own as in a pack."""
    plan = UpdatePlan(epochs=1, count=1, aggregation="token-mean", max_tokens=4)
    batch = batch_of([4, 4])
    untrained = replace(batch, response_mask=batch.response_mask & (torch.arange(8) < 4))
    (mini_batch,) = plan.mini_batches(untrained, seed=0)
    ((first, second),) = plan.micro_batches(mini_batch, dp_size=1)
    assert sorted(float(part.batch.token_shares.sum()) for part in (first, second)) == [0.0, 1.0]
    assert not first.batch.is_filler
    assert not second.batch.is_filler


def test_padding_counts_where_micro_batches_are_padded():
    lengths = [10, 1, 1, 1]
    (packed,) = micro_batches(lengths, max_tokens=13, dp_size=1)
    (padded,) = micro_batches(lengths, max_tokens=13, dp_size=1, padded=True)
    assert len(packed) == 1
    assert all(len(part) * max(lengths[index] for index in part) <= 13 for part in padded)


def test_interleaved_pipelines_get_a_multiple_of_micro_batches():
    for count in (1, 5, 9):
        shares = micro_batches([4] * count, max_tokens=8, dp_size=1, multiple=3)
        assert len(shares[0]) % 3 == 0
        assert sorted(index for part in shares[0] for index in part) == list(range(count))


def test_samples_become_a_batch_also_if_there_are_none():
    fields = {"prompt_id": "", "prompt_text": "", "response_text": "", "finished": True, "data": {}}
    response = Response((7, 8), (-0.5, -0.25), "stop", (0, 0), response_mask=(True, False))
    packed = Sample(
        prompt_tokens=(5, 6), response_tokens=response.tokens, log_probs=response.log_probs,
        response_mask=response.response_mask, **fields,
    )  # fmt: skip
    plain = Sample(prompt_tokens=(1,), response_tokens=(2,), log_probs=(-1.0,), **fields)

    batch = assemble([packed, plain], 0.5)

    assert (batch.lengths.tolist(), batch.tokens.tolist()) == ([4, 2], [5, 6, 7, 8, 1, 2])
    assert batch.response_mask.tolist() == [False, False, True, False, False, True]
    assert batch.rollout_log_probs.tolist() == [0.0, 0.0, -0.5, -0.25, 0.0, -1.0]
    nothing = assemble([], 0.5)
    assert (nothing.num_sequences, nothing.num_tokens, nothing.tokens.dtype) == (0, 0, torch.int32)
    assert nothing.response_mask.dtype is torch.bool
