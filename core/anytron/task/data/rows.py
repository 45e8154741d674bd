"""Read rows from files, one after the other: a file is never in memory as a whole.

One row group of a Parquet file is decoded at a time, and a dataset that was saved to disk is mapped into memory. A line
of the other formats may have :data:`LONGEST_LINE` bytes, and a row of a Parquet file or a dataset may need as many
(:mod:`anytron.task.data.arrow`).
"""

from __future__ import annotations

import csv
import glob
import itertools
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron.base.errors import AnytronError, DataError
from anytron.base.files import exhausted
from anytron.config.json_files import is_writable, parse_json, read_object, strings
from anytron.task.data.arrow import LARGEST_ROW, check_schema, records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow.parquet

LONGEST_LINE = 64 * 2**20
"""Most bytes of a line, or of a field of a CSV file; a million tokens have a tenth of it."""
AT_ONCE = 96
"""Rows that are converted from Arrow's columns at a time."""
MOST_FILES = 10_000
"""Most files that a pattern may match."""
MOST_COLUMNS = 10_000
"""Most columns of a row."""
_PACKED = {b"\x1f\x8b": "gunzip", b"\xfd7zXZ\0": "unxz", b"(\xb5/\xfd": "unzstd", b"PK\3\4": "unzip"}
"""How compressed files begin, and what unpacks them."""
_STATE = "state.json"
_LINE = "write one JSON object on each line, as json.dumps does"


@dataclass(frozen=True)
class Row:
    """One row of a file.

    Attributes:
        where: File and place, for errors.
        name: The place without the file: ``line 7``, ``row 7``; counted from 1.
        read: Function that returns the content of the row, or raises DataError.
        folder: The folder to which paths in the row are relative.
        padded: Whether nested objects have the keys of all rows, with null for missing ones, as in Arrow.
    """

    where: str
    name: str
    read: Callable[[], Any]
    folder: Path
    padded: bool = False

    @cached_property
    def record(self) -> Any:
        """The content of the row; anything but a mapping of columns is refused later."""
        return self.read()


def files_of(path: str) -> list[Path]:
    """Find the file with this name, or the files that match this pattern, sorted by their names.

    Raises:
        DataError: No file, or more than :data:`MOST_FILES`, match.
    """
    if Path(path).is_file():  # a pipe would be waited for
        return [Path(path)]
    names = list(itertools.islice(glob.iglob(path, recursive=True), MOST_FILES + 1))  # noqa: PTH207 - any path
    if len(names) > MOST_FILES:
        why = f"more than {MOST_FILES} paths match; links between folders may form a loop"
        raise DataError(
            "The prompts cannot be read.",
            where=path,
            why=why,
            fix="set the source's option `path` to a pattern that matches fewer files",
        )
    if found := sorted(Path(name) for name in names if Path(name).is_file()):
        return found
    if Path(path).is_dir():
        fix = f"name a file in it, or a pattern: {path}/*.parquet"
        raise DataError("The prompts cannot be read.", where=path, why="it is a folder", fix=fix)
    why = "no such file, or not a regular file"
    raise DataError("The prompts cannot be read.", where=path, why=why, fix="check the source's option `path`")


def jsonl_rows(file: Path) -> Iterator[Row]:
    """Read a file with one JSON object per line, UTF-8, with or without a byte order mark.

    Empty lines are skipped. Only a line feed ends a line, because JSON strings may contain other separators.

    Raises:
        DataError: The file cannot be read; or a line is not JSON, too deeply nested, too long, or not valid Unicode.
    """
    return _in_words(_jsonl_rows(file), file, _LINE)


def _jsonl_rows(file: Path) -> Iterator[Row]:
    folder = file.parent
    for number, line in _lines(file):
        if line.strip():
            where = f"{file}:{number}"
            yield Row(where, f"line {number}", partial(_json, line, where), folder)


def _json(line: str, where: str) -> Any:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise DataError("A line of the prompts cannot be read.", where=where, why=str(error), fix=_LINE) from error
    if isinstance(record, dict):
        _check_columns(len(record), where)
    if "\\ud" in line.lower() and (keys_of := [key for key, text in strings(record) if not is_writable(text)]):
        place = keys_of[0] or "the line"  # a key of the first level has no key above it
        why = f"{place} has half of a surrogate pair (\\ud800 to \\udfff), which is not a character"
        fix = "write the whole pair, or remove it"
        raise DataError("A line of the prompts has text that is not valid Unicode.", where=where, why=why, fix=fix)
    return record


def csv_rows(file: Path) -> Iterator[Row]:
    """Read a CSV file, UTF-8, whose first line names the columns; every value is text.

    Fields with commas, line feeds or quotes stand in double quotes, in which a quote is doubled (RFC 4180).

    Raises:
        DataError: The file cannot be read; a column has no name, or two columns have the same name; a line is not CSV,
            or its number of fields differs from the number of columns.
    """
    return _in_words(_csv_rows(file), file, "write it again, with Python's module csv or a spreadsheet program")


def _csv_rows(file: Path) -> Iterator[Row]:
    reader = csv.reader((line for _, line in _lines(file)), strict=True)
    limit = csv.field_size_limit(LONGEST_LINE)
    columns: list[str] = []
    before = 0
    try:
        for fields in reader:
            where, before = f"{file}:{before + 1}", reader.line_num
            if fields and not columns:
                columns = fields
                _check_columns(len(columns), where)
                _check_names(columns, where)
            elif fields:
                _check_count(fields, columns, where)
                record = dict(zip(columns, fields, strict=True))
                yield Row(where, f"line {where.rpartition(':')[2]}", partial(dict, record), file.parent)
    except csv.Error as error:
        fix = "put double quotes around a field that has a comma, a quote or a line feed, and double the quotes inside"
        raise DataError(
            "A line of the prompts is not CSV.", where=f"{file}:{before + 1}", why=str(error), fix=fix
        ) from error
    finally:
        csv.field_size_limit(limit)


def _check_columns(count: int, where: str) -> None:
    """Refuse more than :data:`MOST_COLUMNS`."""
    if count > MOST_COLUMNS:
        raise DataError(
            "A row of the prompts has too many columns.",
            where=where,
            why=f"it has {count} columns, but at most {MOST_COLUMNS} are read",
            fix="write the file again with only the columns that prompts and rewards need",
        )


def _check_names(columns: list[str], where: str) -> None:
    if "" in columns or len(set(columns)) < len(columns):
        raise DataError(
            "The columns of a CSV file need different names.",
            where=where,
            why=f"its first line is {', '.join(map(repr, columns))}",
            fix="begin the file with a line that gives each column a different name",
        )


def _check_count(fields: list[str], columns: list[str], where: str) -> None:
    if len(fields) != len(columns):
        raise DataError(
            "A line of a CSV file has too many or too few fields.",
            where=where,
            why=f"it has {len(fields)} fields, but the file has {len(columns)} columns: {', '.join(columns)}",
            fix="write one field for each column, with double quotes around a field that has a comma",
        )


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file with their line feeds, numbered from 1."""
    number = 0
    try:
        with file.open("rb") as stream:
            while line := stream.readline(LONGEST_LINE + 1):
                number += 1
                if len(line) > LONGEST_LINE:
                    why, fix = f"it has more than {LONGEST_LINE} bytes", "remove the row, or split it"
                    raise DataError("A line of the prompts is too long.", where=f"{file}:{number}", why=why, fix=fix)
                if number == 1 and (
                    program := next((_PACKED[magic] for magic in _PACKED if line.startswith(magic)), "")
                ):
                    why, fix = "it is compressed", f"unpack it first, with {program}"
                    raise DataError("The prompts cannot be read.", where=str(file), why=why, fix=fix)
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except OSError as error:
        where = f"{file}:{number}" if number else str(file)
        raise exhausted(error, where) or DataError(
            "The prompts cannot be read.", where=where, why=str(error), fix="make the file readable"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            "A line of the prompts is not UTF-8.",
            where=f"{file}:{number}",
            why=str(error),
            fix="write the file in UTF-8",
        ) from error


def parquet_rows(file: Path) -> Iterator[Row]:
    """Read a Parquet file, a row group at a time.

    Raises:
        DataError: The file is not Parquet, or is damaged; a row is too large, or all rows together are too large
            for a file of its size; or it has columns that cannot be read.
    """
    return _in_words(_parquet_rows(file), file, "write it again, with pyarrow, pandas or datasets")


def _parquet_rows(file: Path) -> Iterator[Row]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file, pre_buffer=False) as table:
        _check_columns(table.metadata.num_columns, str(file))
        check_schema(table.schema_arrow, str(file))
        groups = [table.metadata.row_group(index).num_rows for index in range(table.num_row_groups)]
        ends = list(itertools.accumulate(groups))

        name, folder = str(file), file.parent

        def place(number: int) -> str:
            return f"{name}, row {number} (row group {bisect_left(ends, number)})"

        batches = table.iter_batches(min(AT_ONCE, _rows_of(LARGEST_ROW, table.metadata)), use_threads=False)
        fix = "if the file is correct, write it with use_dictionary=False and compression='none'"
        for number, record in records(batches, file.stat().st_size, place, fix, table.metadata.num_rows):
            yield Row(f"{name}, row {number}", f"row {number}", partial(dict, record), folder, padded=True)


def _rows_of(size: int, metadata: pyarrow.parquet.FileMetaData) -> int:
    """Estimate how many rows have ``size`` bytes, from the metadata of row groups; at least one."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    longest = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
    return max(1, size // max(longest, 1))


def dataset_rows(path: Path, split: str | None) -> Iterator[Row]:
    """Read a folder that Hugging Face's ``Dataset.save_to_disk`` has written, or one of its ``.arrow`` files.

    Args:
        path: The folder, or the file.
        split: The split to read, required if there are several; None = the only one.

    Raises:
        DataError: There is no dataset at that path, or no such split.
    """
    fix = "name a folder that Dataset.save_to_disk has written; for other files there are the sources parquet and jsonl"
    return _in_words(_dataset_rows(path, split), path, fix)


def _dataset_rows(path: Path, split: str | None) -> Iterator[Row]:
    import datasets

    files = [path]
    if path.is_file():
        loaded: Any = datasets.Dataset.from_file(str(path))
    elif path.is_dir():  # any other path might be an address of another machine
        files = files_of_dataset(path)
        loaded = datasets.load_from_disk(str(path))
    else:
        raise FileNotFoundError("no such folder")
    chosen = _split(loaded, path, split).with_format("arrow")
    _check_columns(len(chosen.data.schema), str(path))
    check_schema(chosen.data.schema, str(path))
    size, folder = sum(file.stat().st_size for file in files), path if path.is_dir() else path.parent
    fix = "if the file is correct, read it with datasets, and write it as JSON lines with Dataset.to_json"
    for number, record in records(
        chosen.iter(batch_size=AT_ONCE), size, lambda number: f"{path}, row {number}", fix, len(chosen)
    ):
        yield Row(f"{path}, row {number}", f"row {number}", partial(dict, record), folder, padded=True)


def files_of_dataset(folder: Path) -> list[Path]:
    """Find all files of a saved dataset, and refuse pipes, devices, and names that lead out of their folder.

    Raises:
        OSError: A file cannot be read, or is neither a file nor a folder.
        ValueError: A ``state.json`` is malformed, or names a file outside of its folder.
    """
    files = sorted([*folder.iterdir(), *folder.glob("*/*")])
    for file in files:
        if not (file.is_file() or file.is_dir()):  # whoever opens a pipe waits for ever
            raise OSError(f"{file.relative_to(folder)} is neither a file nor a link to one")
        if file.name == _STATE:
            state = read_object(file)
            for part in [*(state.get("_data_files") or []), *(state.get("_indices_data_files") or [])]:
                if Path(name := part["filename"]).name != name:
                    raise ValueError(f"{file.relative_to(folder)} names a file outside of its folder: {name!a}")
    return [file for file in files if file.is_file()]


def _split(loaded: Any, path: Path, split: str | None) -> Any:
    splits = dict(loaded) if isinstance(loaded, dict) else {}
    if not splits and split is None:
        return loaded
    if split is None and len(splits) == 1:
        return next(iter(splits.values()))
    if split not in splits:
        raise DataError(
            "The dataset has no such split." if split else "The dataset has several splits.",
            where=str(path),
            why=f"the option `split` is {split or 'not set'}; the dataset's splits: {', '.join(splits) or 'none'}",
            fix="set the option `split` to one of them" if splits else "remove the option `split`",
        )
    return splits[split]


def _in_words(rows: Iterator[Row], file: Path, fix: str) -> Iterator[Row]:
    """Yield rows; whatever a library raises becomes an error that names the place."""
    behind = ""
    try:
        for row in rows:
            behind = f", after {row.name}"
            yield row
    except AnytronError:
        raise
    except MemoryError as error:
        why = "one part of the file needs more memory than the reading process may use"
        fix = "write smaller rows; in a Parquet file, also write fewer rows into each row group (row_group_size)"
        raise exhausted(error) or DataError(
            "The prompts cannot be read.", where=f"{file}{behind}", why=why, fix=fix
        ) from error
    except Exception as error:  # the libraries fail in their own ways, and in Arrow's
        why = f"{type(error).__name__}: {error}"
        raise exhausted(error) or DataError(
            "The prompts cannot be read.", where=f"{file}{behind}", why=why, fix=fix
        ) from error
