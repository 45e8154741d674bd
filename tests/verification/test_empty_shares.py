"""The shares with nothing to do are what they say, for any number of ranks: what the kit and ``anytron verify`` use."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anytron.proof.verification.empty_shares import empty_shares, short_lengths
from anytron.run.trainer.updates import UpdatePlan
from anytron.sequences.layout import ContextShard
from anytron.sequences.planning import plan_layout
from anytron_conformance.recorded import recorded, recorded_images

BATCHES = {"text": recorded(), "images": recorded_images()}


def divided(share, replicas):
    plan = UpdatePlan(epochs=1, count=1, aggregation="token-mean", max_tokens=share.max_tokens)
    (mini_batch,) = plan.mini_batches(share.batch, seed=0)
    return plan.micro_batches(mini_batch, replicas)


@given(replicas=st.integers(1, 9), context=st.integers(1, 9), kind=st.sampled_from(sorted(BATCHES)))
def test_every_replica_runs_equally_many_micro_batches_and_the_weights_are_whole(replicas, context, kind):
    for share in empty_shares(BATCHES[kind], context):
        parts = divided(share, replicas)
        assert len({len(part) for part in parts}) == 1
        every = [one.batch for part in parts for one in part]
        assert sum(float(one.loss_weights.sum()) for one in every) == pytest.approx(1.0)
        assert sum(not one.is_filler for one in every) <= share.batch.num_sequences
        assert sum(one.num_sequences for one in every if not one.is_filler) == share.batch.num_sequences


@given(replicas=st.integers(2, 9), context=st.integers(1, 9))
def test_all_replicas_but_one_run_fillers_only(replicas, context):
    *_, one = empty_shares(BATCHES["text"], context)
    parts = divided(one, replicas)
    assert sum(all(each.batch.is_filler for each in part) for part in parts) == replicas - 1


@given(replicas=st.integers(2, 9), context=st.integers(1, 9))
def test_images_are_on_one_replica(replicas, context):
    alone, *_ = empty_shares(BATCHES["images"], context)
    seeing = [any(any(each.batch.images) for each in part) for part in divided(alone, replicas)]
    assert sum(seeing) == 1


@given(
    context=st.integers(2, 9),
    tensor=st.sampled_from([1, 2, 4]),
    sequence_format=st.sampled_from(["thd", "bshd"]),
)
def test_some_context_parallel_rank_has_padding_alone_and_no_rank_has_it_always(context, tensor, sequence_format):
    alone, *_ = empty_shares(BATCHES["text"], context)
    shards = [ContextShard(context, rank, None) for rank in range(context)]
    held = torch.tensor(
        [
            [
                int(plan_layout([length], format=sequence_format, tensor_parallel=tensor, shard=shard).valid.sum())
                for shard in shards
            ]
            for length in alone.batch.lengths.tolist()
        ]
    )
    assert held.sum(1).tolist() == alone.batch.lengths.tolist()
    assert (held == 0).any(1)[0]


@given(context=st.integers(1, 64))
def test_lengths_lie_on_both_sides_of_the_number_of_ranks(context):
    lengths = short_lengths(context)
    assert lengths[0] == 1
    assert context in lengths
    assert lengths[-1] > context
    assert len(lengths) <= 6
