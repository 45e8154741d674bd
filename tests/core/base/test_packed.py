"""Packed numbers are like a tuple of them, in a fraction of its memory."""

import copy
import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anytron.base.packed import Packed, Runs, as_numpy, concatenated
from anytron.workers.engines.rollout_engine import Response

NUMBERS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20)


@given(NUMBERS, NUMBERS, st.slices(20))
def test_it_behaves_as_the_tuple(numbers, others, part):
    packed, whole = Packed("i", numbers), tuple(numbers)

    assert packed == whole
    assert whole == packed
    assert packed == Packed("i", numbers)
    assert hash(packed) == hash(whole)
    assert (packed == tuple(others)) == (whole == tuple(others))
    assert (packed == Packed("i", others)) == (whole == tuple(others))
    assert (len(packed), list(packed), bool(packed), repr(packed)) == (
        len(whole),
        list(whole),
        bool(whole),
        repr(whole),
    )
    assert packed[part] == whole[part]
    assert packed + others == whole + tuple(others) == whole + Packed("i", others)
    assert [packed[place] for place in range(-len(whole), len(whole))] == list(whole + whole)
    assert all(number in packed for number in whole)
    for twin in (
        *(pickle.loads(pickle.dumps(packed, protocol)) for protocol in range(2, 6)),
        copy.deepcopy(packed),
    ):
        assert twin == packed
        assert type(twin) is Packed


@given(st.lists(st.integers(-2, 2)), st.lists(st.integers(-2, 2)), st.slices(9))
def test_runs_behave_as_the_tuple(numbers, others, part):
    runs, whole = Runs(numbers), tuple(numbers)

    assert runs == whole
    assert whole == runs
    assert hash(runs) == hash(whole)
    assert (runs == Runs(others)) == (whole == tuple(others))
    assert (len(runs), list(runs), repr(runs)) == (len(whole), list(whole), repr(whole))
    assert runs[part] == whole[part]
    assert runs + others == whole + tuple(others) == whole + Runs(others)
    assert [runs[place] for place in range(-len(whole), len(whole))] == list(whole + whole)
    with pytest.raises(IndexError):
        runs[len(whole)]
    assert [number for number, count in runs.runs for _ in range(count)] == numbers
    assert all(one != other for (one, _), (other, _) in pairwise(runs.runs))
    for twin in (pickle.loads(pickle.dumps(runs)), copy.deepcopy(runs)):
        assert twin == runs
        assert type(twin) is Runs


@given(st.lists(st.floats(allow_nan=False, width=32)))
def test_log_probs_keep_their_values(numbers):
    packed = Packed("f", numbers)

    assert tuple(packed) == tuple(numbers)
    assert as_numpy(packed).dtype == np.float32
    assert as_numpy(packed).tolist() == numbers
    assert pickle.loads(pickle.dumps(packed, protocol=5)) == packed


def test_other_log_probs_are_rounded():
    assert Packed("f", [-0.1])[0] == float(np.float32(-0.1))


@given(st.lists(st.booleans()))
def test_a_mask_is_of_bools(mask):
    assert Packed("b", [2 * one for one in mask]).buffer == Packed("b", mask).buffer
    packed = Packed("b", mask)

    assert all(type(one) is bool for one in packed)
    assert all(type(packed[place]) is bool for place in range(len(mask)))
    assert as_numpy(packed).astype(bool).tolist() == mask == list(packed[:])
    assert not mask or torch.tensor(packed).dtype is torch.bool


def test_a_number_that_does_not_fit_is_an_error():
    with pytest.raises(OverflowError):
        Packed("i", [2**31])
    with pytest.raises(TypeError):
        Packed("i", [0.5])
    with pytest.raises(TypeError):
        Packed("i", [1]).buffer[0] = 2
    assert Packed("i", [1]) != 1


def test_a_response_takes_few_bytes_here_and_on_its_way():
    size = 10_000
    response = Response(
        tuple(range(1000, 1000 + size)), (-0.5,) * size, "stop", (3,) * size, response_mask=(True,) * size
    )

    assert len(pickle.dumps(response)) < 9.1 * size
    assert sum(getattr(response, name).buffer.nbytes for name in ("tokens", "log_probs")) == 8 * size
    assert pickle.loads(pickle.dumps(response)) == response


TYPES = {
    "i": (np.int32, st.integers(-(2**31), 2**31 - 1)),
    "f": (np.float32, st.floats(allow_nan=False, width=32)),
    "b": (np.bool_, st.booleans()),
}
FORMS = {"packed": Packed, "list": lambda _, numbers: numbers, "array": lambda code, numbers: np.array(numbers, code)}


@given(st.data(), st.sampled_from(sorted(TYPES)))
def test_parts_of_any_form_are_concatenated(data, code):
    dtype, numbers = TYPES[code]
    parts = data.draw(st.lists(st.tuples(st.sampled_from(sorted(FORMS)), st.lists(numbers, max_size=4)), max_size=5))

    found = concatenated((FORMS[form](code, part) for form, part in parts), dtype)

    assert found.dtype == dtype
    assert found.tolist() == [number for _, part in parts for number in part]
    torch.from_numpy(found)  # which warns of an array that is not writable
