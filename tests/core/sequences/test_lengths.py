"""Lengths out of what other libraries hand over; what is not ragged and right-padded is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anytron.errors import DataError
from anytron.sequences import lengths_from_cu_seqlens, lengths_from_keep_mask, plan_layout
from anytron.sequences.lengths import checked_lengths

ragged = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@given(lengths=ragged)
def test_cumulative_lengths_give_the_lengths_back(lengths):
    layout = plan_layout(lengths, tensor_parallel=4)
    assert lengths_from_cu_seqlens(layout.cu_seqlens).tolist() == lengths
    assert lengths_from_cu_seqlens(layout.cu_seqlens_padded).tolist() == layout.padded_lengths.tolist()


@given(lengths=ragged, spare=st.integers(0, 3))
def test_a_right_padded_batch_gives_its_lengths_and_its_tokens(lengths, spare):
    layout = plan_layout(lengths, format="bshd", max_seqlen=max(lengths) + spare)
    tokens = torch.arange(sum(lengths))
    padded = layout.pack(tokens, fill=-1)
    assert lengths_from_keep_mask(padded >= 0).tolist() == lengths
    assert torch.equal(padded[padded >= 0], tokens)


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        (torch.tensor([0, 3, 3]), "sequence 1 goes from 3 to 3"),
        (torch.tensor([0, 5, 3]), "sequence 1 goes from 5 to 3"),
        (torch.tensor([3, 5]), "begin with 3"),
        (torch.tensor([0.0, 3.0]), "float32, expected torch.int32 or torch.int64"),
        (torch.tensor([0, 3], dtype=torch.int16), "int16, expected"),
        (torch.tensor([[0, 3]]), "wrong shape"),
        (torch.tensor([0]), "B at least 1"),
    ],
)
def test_impossible_cumulative_lengths_are_refused(cu_seqlens, message):
    with pytest.raises(DataError, match=message):
        lengths_from_cu_seqlens(cu_seqlens)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (torch.tensor([[True, True], [False, True]]), "row 1 has padding on the left"),
        (torch.tensor([[True, False, True]]), "row 0 has padding between tokens"),
        (torch.tensor([[True], [False]]), "sequence 1 has length 0"),
        (torch.tensor([[1, 1, 0]]), "pass mask == 1"),
        (torch.ones(2, 1, 3, 3, dtype=torch.bool), r"\[B, S\]"),
    ],
)
def test_other_padding_than_on_the_right_is_refused(keep, message):
    with pytest.raises(DataError, match=message):
        lengths_from_keep_mask(keep)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "at least one sequence"),
        ([[3]], "at least one sequence"),
        ([3, 0], "sequence 1 has length 0"),
        ([-2], "length -2"),
        ([1.5], "Lengths are integers"),
        (torch.tensor([True]), "Lengths are integers"),
    ],
)
def test_impossible_lengths_are_refused(lengths, message):
    with pytest.raises(DataError, match=message):
        checked_lengths(lengths)


def test_a_sequence_longer_than_the_context_is_refused():
    assert checked_lengths([3, 8], context_length=8).tolist() == [3, 8]
    with pytest.raises(DataError, match="sequence 1 has length 9, the context 8") as caught:
        checked_lengths([3, 9], context_length=8)
    assert "max_new_tokens" in caught.value.fix
