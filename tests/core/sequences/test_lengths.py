"""Impossible lengths are refused."""

from __future__ import annotations

import pytest
import torch

from anytron.base.errors import DataError
from anytron.sequences.planning import checked_lengths


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "and not empty"),
        ([[3]], "and not empty"),
        ([3, 0], "sequence 1 has length 0"),
        ([-2], "length -2"),
        ([1.5], "Lengths must be integers"),
        (torch.tensor([True]), "Lengths must be integers"),
    ],
)
def test_impossible_lengths_are_refused(lengths, message):
    with pytest.raises(DataError, match=message):
        checked_lengths(lengths)


def test_a_sequence_longer_than_the_context_is_refused():
    assert checked_lengths([3, 8], context_length=8).tolist() == [3, 8]
    with pytest.raises(DataError, match="sequence 1 has 9 tokens, but the context has only 8") as caught:
        checked_lengths([3, 9], context_length=8)
    assert "max_new_tokens" in caught.value.fix
