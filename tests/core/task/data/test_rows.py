"""Rows of files: what is read, and what is refused with its place."""

from __future__ import annotations

import csv
import io
import os
import tracemalloc

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anytron.base.errors import DataError
from anytron.task.data import rows
from anytron.task.data.rows import csv_rows, dataset_rows, files_of, jsonl_rows, parquet_rows

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=8)


def records(found):
    return [row.record for row in found]


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=6), st.sampled_from(["\n", "\r\n"]))
def test_a_csv_file_gives_what_was_written(tmp_path_factory, lines, end):
    path = tmp_path_factory.mktemp("csv") / "p.csv"
    written = io.StringIO(newline="")
    writer = csv.writer(written, lineterminator=end)
    writer.writerows([("prompt", "answer"), *lines])
    path.write_bytes(b"\xef\xbb\xbf" + written.getvalue().encode())
    found = list(csv_rows(path))
    assert [tuple(row.record.values()) for row in found] == lines
    assert found[0].name == "line 2"


def test_a_field_of_several_lines_is_named_by_its_first(tmp_path):
    (tmp_path / "p.csv").write_text('a,b\n"1\n2",3\n\n4,5\n6\n')
    found = csv_rows(tmp_path / "p.csv")
    assert [(row.where, row.record) for row in (next(found), next(found))] == [
        (f"{tmp_path}/p.csv:2", {"a": "1\n2", "b": "3"}),
        (f"{tmp_path}/p.csv:5", {"a": "4", "b": "5"}),
    ]
    with pytest.raises(
        DataError, match=r"(?s)too many or too few fields.*p\.csv:6.*1 fields, but the file has 2 columns: a, b"
    ):
        next(found)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", None),
        (b"a,a\n1,2\n", r"(?s)need different names.*p\.csv:1.*'a', 'a'"),
        (b"a,\n1,2\n", "need different names"),
        (b'a,b\n1,"2', r"(?s)not CSV.*p\.csv:2.*unexpected end"),
        (b'a,b\n1,"2" 3\n', r"(?s)not CSV.*p\.csv:2.*double quotes"),
        (b"a,b\n1,2\r3,4\n", r"(?s)not CSV.*p\.csv:2"),
        (b"a,b\n1,\xff\n", r"(?s)is not UTF-8.*p\.csv:2.*utf-8"),
    ],
)
def test_a_csv_file_that_is_none(tmp_path, content, message):
    (tmp_path / "p.csv").write_bytes(content)
    if message is None:
        assert list(csv_rows(tmp_path / "p.csv")) == []
        return
    with pytest.raises(DataError, match=message):
        list(csv_rows(tmp_path / "p.csv"))


@pytest.mark.parametrize(("read", "line"), [(jsonl_rows, b'{"prompt": "%s"}\n'), (csv_rows, b'"%s"\n')])
def test_an_enormous_line_is_refused_before_it_is_in_memory(tmp_path, monkeypatch, read, line):
    monkeypatch.setattr(rows, "LONGEST_LINE", 2000)
    before = csv.field_size_limit()
    (tmp_path / "p").write_bytes(b'{"prompt": "0"}\n' + line % (b"1" * 1900) + line % (b"1" * 20_000_000))
    tracemalloc.start()
    with pytest.raises(DataError, match=r"(?s)too long.*p:3.*more than 2000 bytes"):
        list(read(tmp_path / "p"))
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    assert csv.field_size_limit() == before


def test_a_quote_that_never_ends_does_not_take_the_whole_file(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "LONGEST_LINE", 2000)
    (tmp_path / "p.csv").write_text('a\n1\n"2\n' + "3\n" * 5000)
    with pytest.raises(DataError, match=r"(?s)not CSV.*p\.csv:3.*field larger than field limit"):
        list(csv_rows(tmp_path / "p.csv"))


def test_a_file_is_read_as_it_is_asked_for(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"n": 1}\n{"n": 2}\n{oops\n')
    found = jsonl_rows(tmp_path / "p.jsonl")
    assert [next(found).record["n"], next(found).record["n"]] == [1, 2]
    with pytest.raises(DataError, match=r"p\.jsonl:3"):
        next(found).record  # noqa: B018 - it is read here


def test_bytes_that_are_no_text_are_refused_with_their_line(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"(?s)is not UTF-8.*p\.jsonl:2.*0xff.*write the file in UTF-8"):
        list(jsonl_rows(tmp_path / "p.jsonl"))


def test_a_parquet_file_is_decoded_a_row_group_at_a_time(tmp_path):
    table = pa.table({"prompt": [os.urandom(20_000).hex() for _ in range(1000)]})
    pa.parquet.write_table(table, tmp_path / "p.parquet", row_group_size=50)
    del table
    before, most = pa.total_allocated_bytes(), 0
    for number, row in enumerate(parquet_rows(tmp_path / "p.parquet"), start=1):
        assert row.name == f"row {number}"
        most = max(most, pa.total_allocated_bytes() - before)
    assert number == 1000
    assert most < 1000 * 40_000 / 4


@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: b"{}\n" * 9, lambda data: data[:-1], lambda data: data[:8] + bytes(40) + data[48:]],
)
def test_a_parquet_file_that_is_none(tmp_path, damage):
    path = tmp_path / "p.parquet"
    pa.parquet.write_table(pa.table({"prompt": ["a", "b"] * 50}), path, use_dictionary=False, compression="none")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"(?s)cannot be read.*p\.parquet.*(Arrow|Error)"):
        list(parquet_rows(path))


def test_text_in_parquet_that_is_no_text(tmp_path):
    column = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff"))
    pa.parquet.write_table(pa.table({"prompt": column}), tmp_path / "p.parquet")
    with pytest.raises(DataError, match=r"(?s)cannot be read.*p\.parquet.*UnicodeDecodeError"):
        list(parquet_rows(tmp_path / "p.parquet"))


@pytest.fixture
def saved(tmp_path):
    parts = {
        name: datasets.Dataset.from_dict({"prompt": [f"{name}{number}" for number in range(3)]})
        for name in ("train", "test")
    }
    parts["train"].select([2, 0]).save_to_disk(tmp_path / "one")
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "all")
    return tmp_path


def test_a_dataset_from_disk(saved):
    assert records(dataset_rows(saved / "one", None)) == [{"prompt": "train2"}, {"prompt": "train0"}]
    assert records(dataset_rows(saved / "all", "test"))[0] == {"prompt": "test0"}
    (arrow,) = (saved / "one").glob("*.arrow")
    assert records(dataset_rows(arrow, None)) == [{"prompt": "train2"}, {"prompt": "train0"}]


@pytest.mark.parametrize(
    ("path", "split", "message"),
    [
        ("all", None, "(?s)several splits.*train, test.*option `split`"),
        ("all", "dev", "(?s)no such split.*is dev.*train, test"),
        ("one", "train", "(?s)no such split.*splits: none.*remove"),
        ("nowhere", None, "(?s)cannot be read.*nowhere.*no such folder"),
        ("other", None, "(?s)cannot be read.*other.*save_to_disk"),
        ("p.arrow", None, r"(?s)cannot be read.*p\.arrow"),
    ],
)
def test_a_dataset_that_is_none(saved, path, split, message):
    (saved / "other").mkdir()
    (saved / "p.arrow").write_bytes(b"ARROW1")
    with pytest.raises(DataError, match=message):
        list(dataset_rows(saved / path, split))


def test_no_address_of_another_machine_is_opened(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets, "load_from_disk", lambda path: pytest.fail("it was opened"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        list(dataset_rows(rows.Path("s3://bucket/data"), None))


def test_a_pattern_names_files_in_the_order_of_their_names(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "[c].jsonl", "d.txt"):
        (tmp_path / name).touch()
    (tmp_path / "e.jsonl").mkdir()
    assert [file.name for file in files_of(f"{tmp_path}/*.jsonl")] == ["[c].jsonl", "a.jsonl", "b.jsonl"]
    assert [file.name for file in files_of(f"{tmp_path}/[c].jsonl")] == ["[c].jsonl"], "a file before a pattern"
    with pytest.raises(DataError, match=r"(?s)it is a folder.*/\*\.parquet"):
        files_of(str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "nothing-*", "/dev/zero"):
        with pytest.raises(DataError, match="no such file, or not a regular file"):
            files_of(str(tmp_path / name))
