"""The laws of layouts: nothing is lost, nothing is doubled, labels never cross a sequence."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anytron.base.errors import DataError
from anytron.sequences.layout import IGNORED_LABEL, ContextShard, LayoutConstraints
from anytron.sequences.planning import plan_layout

plans = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(1, 70), min_size=1, max_size=7),
        "format": st.sampled_from(["thd", "bshd"]),
        "tensor_parallel": st.sampled_from([1, 2, 4, 8]),
        "cp": st.sampled_from([1, 2, 4, 8]),
        "fp8": st.booleans(),
        "align": st.sampled_from([1, 3, 16]),
        "bucket": st.sampled_from([1, 5, 64]),
    }
)


def shards(plan):
    """The layout of every context-parallel rank, simulated in one process."""
    arguments = {name: plan[name] for name in ("lengths", "format", "tensor_parallel", "fp8")}
    constraints = LayoutConstraints(align=plan["align"], bucket=plan["bucket"])
    return [
        plan_layout(**arguments, shard=ContextShard(plan["cp"], rank), constraints=constraints)
        for rank in range(plan["cp"])
    ]


@given(plan=plans, trailing=st.sampled_from([(), (3,), (2, 2)]))
def test_unpack_undoes_pack_on_every_rank(plan, trailing):
    layouts = shards(plan)
    values = torch.randn(layouts[0].num_tokens, *trailing)
    slots = torch.cat([layout.pack(values, fill=float("nan")).flatten(0, 1) for layout in layouts])
    for layout in layouts:
        unpacked = layout.unpack(layout.pack(values), gather=lambda _: slots)
        assert torch.equal(unpacked, values)


@given(plan=plans)
def test_sharding_is_a_partition(plan):
    layouts = shards(plan)
    total = layouts[0].num_tokens
    shown = torch.cat([layout.token_index[layout.token_index < total] for layout in layouts])
    assert sorted(shown.tolist()) == list(range(total))
    assert len({layout.shape for layout in layouts}) == 1


@given(plan=plans, ahead=st.integers(1, 4), every=st.sampled_from([1, 2, 3]))
def test_positions_restart_and_labels_are_the_real_tokens_that_follow(plan, ahead, every):
    lengths = plan["lengths"]
    tokens = torch.arange(1, sum(lengths) + 1)
    ignored = tokens % every != 0
    sequences = list(tokens.split(lengths))
    owner = [(i, p) for i, n in enumerate(lengths) for p in range(n)]
    for layout in shards(plan):
        labels = layout.next_tokens(tokens, ahead, ignored=ignored if every > 1 else None).flatten()
        positions = layout.position_ids.flatten()
        for slot, token in enumerate(layout.token_index.tolist()):
            if token == layout.num_tokens:
                assert labels[slot] == IGNORED_LABEL
                continue
            index, position = owner[token]
            assert positions[slot] == position
            following = 0 if position + ahead >= lengths[index] else int(sequences[index][position + ahead])
            assert labels[slot] == (following if following and following % every == 0 else IGNORED_LABEL)


@given(plan=plans)
def test_padded_lengths_keep_every_promise(plan):
    layout = shards(plan)[0]
    chunks = 2 * plan["cp"] if plan["cp"] > 1 else 1
    align = math.lcm(plan["tensor_parallel"] * chunks, plan["align"])
    assert (layout.padded_lengths >= layout.lengths).all()
    assert (layout.padded_lengths % align == 0).all()
    total = int(layout.padded_lengths.sum())
    if plan["format"] == "thd":
        assert total % plan["bucket"] == 0
        if plan["fp8"]:
            assert (layout.padded_lengths % math.lcm(16, align) == 0).all()
            assert total % (128 * align) == 0
    else:
        assert len(set(layout.padded_lengths.tolist())) == 1
        assert int(layout.padded_lengths[0]) % plan["bucket"] == 0
        if plan["fp8"]:
            assert total % (128 * plan["tensor_parallel"] * plan["cp"]) == 0
    assert layout.cu_seqlens_padded.tolist() == [0, *layout.padded_lengths.cumsum(0).tolist()]
    assert layout.max_seqlen == int(layout.padded_lengths.max())
    assert layout.shape[0] * layout.shape[1] * plan["cp"] == total


def test_zigzag_gives_the_first_rank_the_first_and_the_last_chunk():
    layout = plan_layout([8, 4], shard=ContextShard(2, 0))
    assert layout.position_ids.tolist() == [[0, 1, 6, 7, 0, 3]]


def test_nothing_is_padded_where_nothing_asks_for_it():
    layout = plan_layout([3, 1, 5])
    assert layout.shape == (1, 9)
    assert bool(layout.valid.all())


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([], "and not empty"), ([3, 0], "sequence 1 has length 0"), ([-2], "length -2")],
)
def test_impossible_lengths_are_refused(lengths, message):
    with pytest.raises(DataError, match=message):
        plan_layout(lengths)


def test_values_of_another_size_are_refused():
    layout = plan_layout([3, 2])
    with pytest.raises(DataError, match="6 values for 5 tokens"):
        layout.pack(torch.zeros(6))
    with pytest.raises(DataError, match=r"\(1, 4\), but the layout has \(1, 5\)"):
        layout.unpack(torch.zeros(1, 4))


def test_a_sharded_layout_cannot_be_unpacked_without_its_other_shards():
    layout = plan_layout([4], shard=ContextShard(2, 1))
    with pytest.raises(DataError, match="needs a gather"):
        layout.unpack(torch.zeros(*layout.shape))
