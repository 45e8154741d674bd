"""What goes through a layout beside ids: routing and positions of images; who shards."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anytron.base.errors import DataError
from anytron.sequences.layout import IGNORED_LABEL, ContextShard, LayoutConstraints
from anytron.sequences.planning import plan_layout

plans = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(1, 40), min_size=1, max_size=6),
        "format": st.sampled_from(["thd", "bshd"]),
        "tensor_parallel": st.sampled_from([1, 2]),
        "fp8": st.booleans(),
    }
)
context_sizes = st.sampled_from([1, 2, 4])


def all_shards(plan, cp, **more):
    return [plan_layout(**plan, **more, shard=ContextShard(cp, rank)) for rank in range(cp)]


def gathered(layouts, outputs, rank):
    """What a gather gives on ``rank``: the others' slots without, its own with gradient."""
    return lambda own: torch.cat([own if r == rank else output for r, output in enumerate(outputs)])


@settings(deadline=None, max_examples=80)
@given(plan=plans, cp=context_sizes)
def test_routing_indices_and_image_positions_follow_the_ids(plan, cp):
    layouts = all_shards(plan, cp)
    total = layouts[0].num_tokens
    ids = torch.arange(total)
    routing = (ids[:, None, None] * 10 + torch.arange(6).view(1, 2, 3)).int()
    axes = ids[None] + torch.tensor([0, 1000, 2000])[:, None]
    for layout in layouts:
        packed_ids = layout.pack(ids, fill=-1)
        packed_routing, packed_axes = layout.pack(routing), layout.pack_axes(axes)
        assert packed_routing.shape == (*layout.shape, 2, 3)
        assert packed_routing.dtype is torch.int32
        assert packed_axes.shape == (3, *layout.shape)
        real = packed_ids >= 0
        assert torch.equal(packed_routing[real], routing[packed_ids[real]])
        assert torch.equal(packed_axes[:, real], axes[:, packed_ids[real]])
        assert not packed_axes[:, ~real].any()


@settings(deadline=None, max_examples=80)
@given(plan=plans, cp=context_sizes)
def test_a_gather_gives_the_gradient_of_the_local_slice_only(plan, cp):
    layouts = all_shards(plan, cp)
    total = layouts[0].num_tokens
    outputs = [layout.pack(torch.ones(total, dtype=torch.float64)).requires_grad_() for layout in layouts]
    slots = [output.detach().flatten() for output in outputs]
    for rank, (layout, output) in enumerate(zip(layouts, outputs, strict=True)):
        (layout.unpack(output, gathered(layouts, slots, rank)) * 3).sum().backward()
        assert torch.equal(output.grad, 3.0 * layout.valid)


@settings(deadline=None, max_examples=80)
@given(plan=plans, cp=context_sizes)
def test_a_model_that_shards_inside_gets_whole_sequences_whose_shards_are_ours(plan, cp):
    layouts = all_shards(plan, cp, input_layout="whole")
    ids = torch.arange(layouts[0].num_tokens)
    whole = layouts[0].taken.pack(ids, fill=-1)
    positions = layouts[0].taken.position_ids
    assert whole.shape[1] == cp * layouts[0].shape[1]
    # Sharding as mcore-bridge's split_cp_inputs: by cu_seqlens in thd, by row in bshd.
    ends = layouts[0].cu_seqlens_padded.tolist()
    parts = [range(a, b) for a, b in itertools.pairwise(ends)] if plan["format"] == "thd" else [range(whole.shape[1])]
    for rank, layout in enumerate(layouts):
        assert layout.taken.shard.size == 1
        chunks = (rank, 2 * cp - 1 - rank) if cp > 1 else (rank,)
        mine = []
        for part in parts:
            width = len(part) // layout.shard.chunks
            for chunk in chunks:
                mine += list(part[chunk * width : (chunk + 1) * width])
        assert torch.equal(whole[:, mine], layout.pack(ids, fill=-1))
        assert torch.equal(positions[:, mine], layout.position_ids)


@settings(deadline=None, max_examples=40)
@given(plan=plans, cp=context_sizes)
def test_a_model_that_packs_inside_gets_bare_rows_and_answers_in_our_slots(plan, cp):
    plan = {**plan, "format": "thd"}
    for layout in all_shards(plan, cp, input_layout="rows"):
        taken = layout.taken
        assert taken.format == "bshd"
        assert taken.shape == (len(plan["lengths"]), max(plan["lengths"]))
        assert torch.equal(taken.valid.sum(1), layout.lengths)
        assert layout.shape[0] == 1


def test_without_context_parallelism_the_whole_is_the_shard():
    layout = plan_layout([3, 4], input_layout="whole")
    assert layout.taken is layout


def test_positions_of_padding_stay_inside_of_the_context():
    layout = plan_layout([5], tensor_parallel=8, context_length=6)
    assert layout.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 5, 5]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "bhsd"}, "use 'thd' or 'bshd'"),
        ({"input_layout": "model"}, "Unknown value of input_layout"),
        ({"format": "bshd", "input_layout": "rows"}, "input_layout='whole'"),
        ({"tensor_parallel": 0}, "The tensor-parallel size must be at least 1"),
        ({"context_length": 4}, "5 tokens, but the context has only 4"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(DataError, match=message):
        plan_layout([3, 5], **arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ContextShard(2, 2), "the rank is 2, the size is 2"),
        (lambda: ContextShard(0), "the rank is 0, the size is 0"),
        (lambda: LayoutConstraints(align=0), "align is 0"),
        (lambda: LayoutConstraints(bucket=-8), "bucket is -8"),
    ],
)
def test_impossible_shards_and_constraints_are_refused(make, message):
    with pytest.raises(DataError, match=message):
        make()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda layout: layout.pack_axes(torch.zeros(5, 3)), r"expected \(A, 5\)"),
        (lambda layout: layout.pack(torch.tensor(1.0)), "a single number for 5 tokens"),
        (lambda layout: layout.next_tokens(torch.zeros(4, dtype=torch.int64)), r"expected \(5,\)"),
    ],
)
def test_values_that_do_not_fit_are_refused(call, message):
    with pytest.raises(DataError, match=message):
        call(plan_layout([3, 2]))


def test_an_incomplete_gather_is_refused():
    layout = plan_layout([4, 3], shard=ContextShard(2, 0))
    with pytest.raises(DataError, match="4 slots, but 2 ranks have 8"):
        layout.unpack(torch.zeros(layout.shape), gather=lambda own: own)


def test_one_token_sequences_predict_nothing():
    layout = plan_layout([1, 1, 2])
    assert layout.next_tokens(torch.tensor([7, 8, 9, 5])).tolist() == [[IGNORED_LABEL, IGNORED_LABEL, 5, IGNORED_LABEL]]
