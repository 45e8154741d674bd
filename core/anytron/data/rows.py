"""Read rows from files, one after the other: a file is never in memory as a whole.

Of a Parquet file one row group is decoded at a time, and a dataset that was saved to disk is mapped into memory. A line
of the other formats may have :data:`LONGEST_LINE` bytes.
"""

from __future__ import annotations

import csv
import glob
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron.config.json_files import parse_json
from anytron.config.plain import is_writable, strings
from anytron.errors import DataError
from anytron.files import exhausted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pyarrow.parquet

LONGEST_LINE = 64 * 2**20
"""Bytes of a line, or of a field of a CSV file; a million tokens have a tenth of it."""
AT_ONCE = 64
"""Rows that are made of Arrow's columns at a time."""


@dataclass(frozen=True)
class Row:
    """One row of a file.

    Attributes:
        where: File and place, for errors.
        name: The place alone: ``line 7``, ``row 7``; counted from 1.
        record: Whatever the row holds; a mapping of columns, or it is refused later.
        folder: What paths in the row are relative to.
        padded: Objects inside of it have the entries of those in all other rows, null where they had none: Arrow's.
    """

    where: str
    name: str
    record: Any
    folder: Path
    padded: bool = False


def files_of(path: str) -> list[Path]:
    """Find the file of that name, or those that match a pattern, sorted by their names.

    Raises:
        DataError: There is none.
    """
    if Path(path).is_file():  # a pipe would be waited for
        return [Path(path)]
    if found := sorted(Path(name) for name in glob.glob(path, recursive=True) if Path(name).is_file()):  # noqa: PTH207
        return found
    is_folder = Path(path).is_dir()
    raise DataError(
        "The prompts cannot be read.",
        where=path,
        why="it is a folder" if is_folder else "no such file, or it is none",
        fix=f"name a file in it, or a pattern: {path}/*.parquet"
        if is_folder
        else "check the option path in section data",
    )


def jsonl_rows(file: Path) -> Iterator[Row]:
    """Read a file with one JSON object per line, UTF-8, with or without a mark at its beginning.

    Empty lines are skipped. Nothing but a line feed ends a line: JSON has other separators inside of strings.

    Raises:
        DataError: The file cannot be read; or a line is not JSON, nested too deeply, too long, or has half a letter.
    """
    for number, line in _lines(file):
        if line.strip():
            where = f"{file}:{number}"
            yield Row(where, f"line {number}", _json(line, where), file.parent)


def _json(line: str, where: str) -> Any:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise DataError("A line of the prompts cannot be read.", where=where, why=str(error)) from error
    if "\\ud" in line.lower() and (keys_of := [key for key, text in strings(record) if not is_writable(text)]):
        why = f"{keys_of[0]} has half of a surrogate pair (\\ud800 to \\udfff), which is no letter"
        raise DataError("A line of the prompts has text that is none.", where=where, why=why)
    return record


def csv_rows(file: Path) -> Iterator[Row]:
    """Read a CSV file, UTF-8, whose first line names the columns; every value is text.

    Fields with commas, line feeds or quotes stand in double quotes, in which a quote is doubled (RFC 4180).

    Raises:
        DataError: The file cannot be read; a column has no name or that of another one; a line is not CSV or has
            another number of fields than there are columns.
    """
    reader = csv.reader((line for _, line in _lines(file)), strict=True)
    limit = csv.field_size_limit(LONGEST_LINE)
    columns: list[str] = []
    before = 0
    try:
        for fields in reader:
            where, before = f"{file}:{before + 1}", reader.line_num
            if fields and not columns:
                columns = fields
                _check_columns(columns, where)
            elif fields:
                _check_count(fields, columns, where)
                yield Row(
                    where, f"line {where.rpartition(':')[2]}", dict(zip(columns, fields, strict=True)), file.parent
                )
    except csv.Error as error:
        fix = "put a field that has a comma, a quote or a line feed into double quotes, and double the quotes in it"
        raise DataError(
            "A line of the prompts is not CSV.", where=f"{file}:{before + 1}", why=str(error), fix=fix
        ) from error
    finally:
        csv.field_size_limit(limit)


def _check_columns(columns: list[str], where: str) -> None:
    if "" in columns or len(set(columns)) < len(columns):
        raise DataError(
            "The columns of a CSV file have no names of their own.",
            where=where,
            why=f"its first line is {', '.join(map(repr, columns))}",
            fix="begin the file with a line that names each column once",
        )


def _check_count(fields: list[str], columns: list[str], where: str) -> None:
    if len(fields) != len(columns):
        raise DataError(
            "A line of a CSV file has another number of fields than there are columns.",
            where=where,
            why=f"{len(fields)} fields, and {len(columns)} columns: {', '.join(columns)}",
            fix="put a field that has a comma into double quotes",
        )


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file with their line feeds, numbered from 1."""
    number = 0
    try:
        with file.open("rb") as stream:
            while line := stream.readline(LONGEST_LINE + 1):
                number += 1
                if len(line) > LONGEST_LINE:
                    why = f"it has more than {LONGEST_LINE} bytes"
                    raise DataError("A line of the prompts is too long.", where=f"{file}:{number}", why=why)
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except (OSError, UnicodeDecodeError) as error:
        where = f"{file}:{number}" if number else str(file)
        raise exhausted(error, where) or DataError(
            "The prompts cannot be read.", where=where, why=str(error), fix="write it as UTF-8"
        ) from error


def parquet_rows(file: Path) -> Iterator[Row]:
    """Read a Parquet file, a row group at a time.

    Raises:
        DataError: It is no Parquet file, or damaged.
    """
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file, pre_buffer=False) as table:
            rows = min(AT_ONCE, _rows_of(LONGEST_LINE, table.metadata))
            yield from _arrow_rows(table.iter_batches(batch_size=rows, use_threads=False), file, file.parent)
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise exhausted(error) or _damaged(file, error, "write it again, with pyarrow, pandas or datasets") from error


def _rows_of(size: int, metadata: pyarrow.parquet.FileMetaData) -> int:
    """How many rows have about so many bytes, by what a file says of its row groups; at least one."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    longest = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
    return max(1, size // max(longest, 1))


def dataset_rows(path: Path, split: str | None) -> Iterator[Row]:
    """Read what ``Dataset.save_to_disk`` of the library datasets has written, or an ``.arrow`` file of its.

    Args:
        path: The folder, or the file.
        split: The split to take; needed where there are several.

    Raises:
        DataError: There is none at that path, or no such split.
    """
    import datasets

    try:
        if path.is_file():
            loaded: Any = datasets.Dataset.from_file(str(path))
        elif path.is_dir():  # any other path might be an address of another machine
            loaded = datasets.load_from_disk(str(path))
        else:
            raise FileNotFoundError("no such folder")  # noqa: TRY301 - one way to say it
        chosen = _split(loaded, path, split)
        batches = (table for table in chosen.with_format("arrow").iter(batch_size=AT_ONCE))
        yield from _arrow_rows(batches, path, path if path.is_dir() else path.parent)
    except DataError:
        raise
    except Exception as error:  # the library fails in its own ways, and in Arrow's
        fix = (
            "name a folder that Dataset.save_to_disk has written; other files have sources of their own: parquet, jsonl"
        )
        raise _damaged(path, error, fix) from error


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
            why=f"asked for {split!r}; it has {', '.join(splits) or 'none'}",
            fix="set the option split to one of them" if splits else "remove the option split",
        )
    return splits[split]


def _arrow_rows(batches: Iterable[Any], file: Path, folder: Path) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for record in batch.to_pylist():
            number += 1
            yield Row(f"{file}, row {number}", f"row {number}", record, folder, padded=True)


def _damaged(file: Path, error: Exception, fix: str) -> DataError:
    return DataError("The prompts cannot be read.", where=str(file), why=f"{type(error).__name__}: {error}", fix=fix)
