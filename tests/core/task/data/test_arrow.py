"""What Arrow's columns become is bounded before they become it."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anytron.base.errors import DataError
from anytron.task.data import arrow
from anytron.task.data.arrow import check_schema, records


def read(table, size=1000, most=10**9, rows=0):
    return list(records(table.to_batches(), size, lambda number: f"row {number}", "write it otherwise", rows))


def dictionary(value, count):
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array([value]))


class Recorded:
    """A batch that notices when objects are made of it."""

    def __init__(self, batch, made):
        self._batch, self._made = batch, made
        self.columns, self.num_rows, self.schema = batch.columns, batch.num_rows, batch.schema

    def slice(self, begin, count):
        return Recorded(self._batch.slice(begin, count), self._made)

    def to_pylist(self):
        self._made.append(self.num_rows)
        return self._batch.to_pylist()


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array(["a", "b" * 3000]), r"too long.*row 2.*more than 2000 bytes"),
        (pa.array([b"a", b"b" * 3000]), "too long.*row 2"),
        (pa.array([b"a", b"b" * 3000], pa.binary_view()), "too long.*row 2"),
        (dictionary("b" * 3000, 2), "too long.*row 1"),
        (pa.ListArray.from_arrays(pa.array([0, 0, 60], pa.int32()), dictionary("b" * 50, 60)), "too long.*row 2"),
        (pa.array([[], [None] * 60]), "too long.*row 2"),
        (pa.array([[], [True] * 60]), "too long.*row 2"),
        (pa.array([[], [{}] * 60], pa.list_(pa.struct([]))), "too long.*row 2"),
        (pa.array([None, [0] * 60], pa.list_(pa.int8(), 60)), "too long.*row 2"),
        (pa.array([[], [("k", "v" * 3000)]], pa.map_(pa.string(), pa.string())), "too long.*row 2"),
        (pa.array([{"a": {"b": "c"}}, {"a": {"b": "c" * 3000}}]), "too long.*row 2"),
        (dictionary("b" * 100, 500), r"far more than its size.*10 bytes and 500 rows, which take \d+ bytes of memory"),
        (pa.array(["a"] * 500), "far more than its size"),
    ],
)
def test_what_is_refused_is_never_made(monkeypatch, column, message):
    monkeypatch.setattr(arrow, "LARGEST_ROW", 2000)
    monkeypatch.setattr(arrow, "FREE", 100_000)
    (batch,) = pa.table({"a": column}).to_batches()
    made = []
    with pytest.raises(DataError, match=f"(?s){message}") as caught:
        list(records([Recorded(batch, made)], 10, lambda number: f"row {number}", "write it otherwise", 0))
    assert caught.value.fix
    assert made == []
    monkeypatch.setattr(arrow, "LARGEST_ROW", 10**9)
    monkeypatch.setattr(arrow, "FREE", 10**9)
    assert len(read(pa.table({"a": column}))) == len(column), "without the limits it is read"


def test_rows_that_are_large_together_are_given_one_by_one(monkeypatch):
    monkeypatch.setattr(arrow, "LARGEST_ROW", 2000)
    (batch,) = pa.table({"a": ["b" * 1000] * 5}).to_batches()
    made = []
    found = records([Recorded(batch, made)], 10_000, str, "", 5)
    assert next(found) == (1, {"a": "b" * 1000})
    assert made == [1]
    assert [number for number, _ in found] == [2, 3, 4, 5]


def test_a_file_that_says_how_many_rows_it_has_is_believed_if_they_are_too_many():
    with pytest.raises(DataError, match=r"(?s)far more than its size.*1000 bytes and 9999999999 rows"):
        read(pa.table({"a": [1]}), rows=9_999_999_999)


KINDS = st.sampled_from([pa.string(), pa.large_string(), pa.string_view()])


@given(st.lists(st.text(max_size=9) | st.none(), min_size=1, max_size=9), st.integers(0, 8), st.booleans(), KINDS)
def test_texts_weigh_their_bytes_however_they_are_kept(texts, begin, encoded, kind):
    column = pa.array(texts, kind)
    column = (column.dictionary_encode() if encoded else column).slice(begin)
    expected = sum(len(text.encode()) for text in texts[begin:] if text is not None)
    assert arrow._measure_of(column.type)(column) - arrow.VALUE * len(column) == expected
    lists = pa.array([texts, []], pa.list_(kind)).slice(0, 1)
    assert arrow._measure_of(lists.type)(lists) == arrow.VALUE * (1 + len(texts)) + sum(
        len(text.encode()) for text in texts if text is not None
    )


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (pa.run_end_encoded(pa.int32(), pa.string()), "its type is run_end_encoded"),
        (pa.dense_union([pa.field("a", pa.int8())]), "its type is dense_union"),
        (pa.list_view(pa.int8()), "its type is list_view"),
        (pa.list_(pa.month_day_nano_interval()), "its type is month_day_nano_interval"),
        (pa.dictionary(pa.int8(), pa.list_(pa.int8())), "its type is dictionary"),
    ],
)
def test_types_that_are_not_read(kind, fault):
    with pytest.raises(DataError, match=f"(?s)column 'x'.*{fault}"):
        check_schema(pa.schema([("x", kind)]), "a file")


def test_types_that_are_read():
    kinds = [pa.null(), pa.bool_(), pa.float16(), pa.decimal256(50, 2), pa.large_binary(), pa.time64("ns")]
    kinds += [pa.binary(4), pa.duration("s"), pa.timestamp("us", "UTC"), pa.date64(), pa.uuid()]
    kinds += [pa.large_list(pa.struct([("a", pa.map_(pa.string(), pa.list_(pa.int8(), 2)))]))]
    check_schema(pa.schema([(str(number), kind) for number, kind in enumerate(kinds)]), "a file")
