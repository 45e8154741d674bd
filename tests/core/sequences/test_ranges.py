"""Ranges of a mask are its True entries, and a selection by ranges has the bits of one by indices."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anytron.sequences.batch import token_index
from anytron.sequences.ranges import bounds_of, slices, taken
from tests.core.sequences.test_encoding import batches, bits


@given(st.lists(st.booleans()))
def test_ranges_hold_the_true_entries_and_are_as_few_as_possible(entries):
    mask = np.array(entries, np.bool_)
    starts, ends = bounds_of(mask)
    assert [place for start, end in zip(starts, ends, strict=True) for place in range(start, end)] == [
        place for place, entry in enumerate(entries) if entry
    ]
    assert (starts < ends).all()
    assert (ends[:-1] < starts[1:]).all()
    values = np.arange(2 * len(mask), dtype=np.int16).reshape(-1, 2)
    found = taken(values, slices(starts, ends))
    assert found.dtype == np.int16
    assert np.array_equal(found, values[mask])


@settings(deadline=None)
@given(batches(), st.data())
def test_a_selection_has_the_bits_of_its_sequences(batch, data):
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, batch.num_sequences - 1), max_size=8)), dtype=torch.int64)
    index, found = token_index(batch.lengths, chosen), bits(batch.select(chosen))
    for name, value in batch._fields().items():
        if isinstance(value, torch.Tensor):
            wanted = value[chosen if name in ("lengths", "groups") else index]
            assert found[name] == (wanted.dtype, wanted.shape, wanted.numpy().tobytes())
        else:
            assert found[name] == value


@settings(deadline=None)
@given(batches())
def test_tokens_of_responses_are_counted(batch):
    parts = batch.response_mask.split(batch.lengths.tolist())
    assert batch.response_counts.tolist() == [int(part.sum()) for part in parts]
