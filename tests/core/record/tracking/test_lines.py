"""Lines are read from the end as from the beginning, and the last ones go in one step, whenever that is interrupted."""

from __future__ import annotations

import io
import json
import sys
import tempfile
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anytron.record.tracking import lines
from anytron.record.tracking.lines import backwards, cut_back, last_record, read_jsonl

STEPS = st.lists(st.integers(0, 6), max_size=12).map(sorted)
"""Steps of records; those of samples are repeated."""


def written(steps):
    """Return the lines of records, of different lengths."""
    return [json.dumps({"step": step, "text": "\u2028" * place}).encode() + b"\n" for place, step in enumerate(steps)]


@given(st.lists(st.binary(max_size=9).map(lambda part: part.replace(b"\n", b"x"))), st.booleans(), st.integers(1, 12))
def test_from_the_end_are_the_same_lines(parts, whole, block):
    content = b"\n".join(parts) + b"\n" * whole
    forwards = io.BytesIO(content).readlines()
    places = [0, *accumulate(map(len, forwards))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "BLOCK", block)
        found = list(backwards(io.BytesIO(content)))
    assert found[::-1] == list(zip(places, forwards, strict=False))


def test_only_the_end_is_read(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"no record\n" * 99_999 + b"".join(written([1, 2, 3])))
    read = []

    class Counted(io.BytesIO):
        def read(self, size):
            read.append(size)
            return super().read(size)

    next(backwards(Counted(path.read_bytes())))
    assert sum(read) <= lines.BLOCK
    assert last_record(path) == {"step": 3, "text": "\u2028\u2028"}
    cut_back(path, 2)
    assert last_record(path)["step"] == 2
    assert path.read_bytes().startswith(b"no record\n"), "the lines before are not looked at"
    assert [record["step"] for record in read_jsonl(path)] == [1, 2]


def test_of_an_empty_file_there_is_no_last_record(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    assert last_record(tmp_path / "metrics.jsonl") is None
    (tmp_path / "metrics.jsonl").write_text("[1]\n")
    with pytest.raises(ValueError, match="not an object"):
        last_record(tmp_path / "metrics.jsonl")


@given(STEPS, st.integers(0, 7), st.data())
def test_a_run_killed_while_it_wrote_goes_on_with_whole_records(steps, step, data):
    """The file is cut anywhere, inside of a line, too; then it may have what a power cut leaves."""
    content = b"".join(written(steps))
    content = content[: data.draw(st.integers(0, len(content)))] + data.draw(st.sampled_from([b"", b"\0" * 9, b"\0\n"]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics.jsonl")
        path.write_bytes(content)
        cut_back(path, step)
        wanted = [line for line in written(steps) if line in content and json.loads(line)["step"] <= step]
        assert path.read_bytes() == b"".join(wanted)
        assert [record["step"] for record in read_jsonl(path)] == [json.loads(line)["step"] for line in wanted]


@given(STEPS, st.integers(0, 7), st.binary(max_size=5))
def test_a_run_killed_while_it_cuts_back_has_the_old_file_or_the_new_one(steps, step, rest):
    """Before each line of the program the file is looked at: there the process might be killed."""
    content = b"".join(written(steps)) + rest.replace(b"\n", b"x")
    kept = b"".join(line for line in written(steps) if json.loads(line)["step"] <= step)
    seen = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics.jsonl")
        path.write_bytes(content)

        def look(frame, event, argument):
            seen.append(path.read_bytes())
            return look

        before = sys.gettrace()
        sys.settrace(lambda frame, *_: look if frame.f_code.co_filename == lines.__file__ else None)
        try:
            cut_back(path, step)
        finally:
            sys.settrace(before)
        assert list(Path(folder).iterdir()) == [path]
    assert {seen[0], seen[-1]} == {content, kept}
    assert set(seen) == {content, kept}


def test_the_file_stays_the_same_file(tmp_path):
    """A copy would need room for all samples of the run, and time."""
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b"".join(written([1, 2, 3])))
    before = path.stat().st_ino
    cut_back(path, 1)
    assert (path.stat().st_ino, path.read_bytes()) == (before, b"".join(written([1])))


def test_a_link_is_not_followed(tmp_path):
    mine, link = tmp_path / "mine", tmp_path / "samples.jsonl"
    mine.write_bytes(b"".join(written([1, 2])))
    link.symlink_to(mine)
    cut_back(link, 1)
    assert (link.is_symlink(), link.read_bytes(), mine.read_bytes()) == (False, b"", b"".join(written([1, 2])))
