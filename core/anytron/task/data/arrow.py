"""Convert Arrow columns to rows, after a check of the memory that the rows will take.

Parquet and Arrow can store a repeated value once with a count, so that two kilobytes can expand to terabytes. Therefore
the size of the Python objects of a row and of a file is first computed from the columns.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from anytron.base.errors import DataError
from anytron.config.json_files import DEEPEST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pyarrow as pa

    Measure = Callable[[Any], int]
    """Function that estimates the bytes that Python takes for the values of an array."""

LARGEST_ROW = 64 * 2**20
"""Most bytes of memory of a row; a million tokens take a tenth of it."""
FREE = 64 * 2**20
"""Bytes of memory that all rows of a file together may take, however small the file is."""
TIMES = 100
"""Beyond :data:`FREE`, the rows may take this many times the file's size; texts are compressed to a tenth."""
VALUE, ROW = 40, 256
"""About how many bytes Python takes for a value in a list (beside its letters), and for a row."""

_VIEWS = ("string_view", "binary_view")
_TEXTS = (*_VIEWS, "string", "large_string", "binary", "large_binary", "fixed_size_binary")
_SCALARS = (*_TEXTS, "boolean", "integer", "floating", "decimal", "null", "date", "time", "timestamp", "duration")
_LISTS = ("list", "large_list", "fixed_size_list", "map")


def check_schema(schema: pa.Schema, where: str) -> None:
    """Refuse a table if two columns have the same name, or a column's type cannot be read or is nested too deeply.

    Args:
        schema: Schema of the table.
        where: Name of the file, for the error.

    Raises:
        DataError: A column is refused.
    """
    names = [str(name) for name in schema.names]
    if twice := next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None:
        raise DataError(
            "Two columns of a file have the same name.",
            where=where,
            why=f"more than one column is named {twice!r}",
            fix="write the file again with a different name for each column",
        )
    for field in schema:
        if fault := _fault(field.type):
            raise DataError(
                "A column of a file cannot be read.",
                where=f"{where}, column {field.name!r}",
                why=fault,
                fix="write the file again without this column, or store texts, numbers, lists or objects in the column",
            )


def _fault(kind: pa.DataType, levels: int = DEEPEST) -> str:
    """Return why a type is not read; empty if it is."""
    import pyarrow as pa

    if not levels:
        return f"it is nested more than {DEEPEST} levels"
    if isinstance(kind, pa.BaseExtensionType):
        return _fault(kind.storage_type, levels - 1)
    if _is(kind, _SCALARS) or (_is(kind, ("dictionary",)) and _is(kind.value_type, _SCALARS)):
        return ""
    if _is(kind, (*_LISTS, "struct")):
        inner = (kind.field(index).type for index in range(kind.num_fields))
        return next((fault for one in inner if (fault := _fault(one, levels - 1))), "")
    return f"its type is {str(kind)[:60]}, which is not supported"


def _is(kind: pa.DataType, names: Iterable[str]) -> bool:
    import pyarrow as pa

    return any(getattr(pa.types, f"is_{name}")(kind) for name in names)


def records(
    batches: Iterable[Any], size: int, place: Callable[[int], str], fix: str, rows: int
) -> Iterator[tuple[int, Any]]:
    """Yield each row as (number, row): the number counts from 1, the row is a mapping of columns.

    Args:
        batches: Record batches, or tables, of a schema that has been checked.
        size: Size of the file in bytes.
        place: Function that names a row by its number, for errors.
        fix: Remedy to print if the file is refused because it expands to far more than its size.
        rows: Number of rows, according to the file.

    Raises:
        DataError: A row, or the rows together, are too large.
    """
    number, total, most = 0, 0, FREE + TIMES * size
    measures: list[Measure] = []
    if rows * ROW > most:
        raise _inflated(f"{rows} rows", size, place(1), fix)
    for batch in batches:
        measures = measures or _measures_of(batch)
        weight = _weight_of(batch, measures)
        pieces = [batch]
        if weight > LARGEST_ROW:
            pieces = [batch.slice(index, 1) for index in range(batch.num_rows)]
            for index, piece in enumerate(pieces, start=number + 1):
                if _weight_of(piece, measures) > LARGEST_ROW:
                    why = f"it needs more than {LARGEST_ROW} bytes of memory"
                    fix = "remove the row, or split it"
                    raise DataError("A row of the prompts is too long.", where=place(index), why=why, fix=fix)
        total += weight + ROW * batch.num_rows
        if total > most:
            raise _inflated(
                f"{number + batch.num_rows} rows, which take {total} bytes of memory", size, place(number + 1), fix
            )
        for piece in pieces:
            for record in piece.to_pylist():
                number += 1
                yield number, record


def _inflated(what: str, size: int, where: str, fix: str) -> DataError:
    why = f"the file has {size} bytes and {what}; rows may take at most {TIMES} times the file's size plus {FREE} bytes"
    return DataError("A file of prompts expands to far more than its size.", where=where, why=why, fix=fix)


def _measures_of(batch: Any) -> list[Measure]:
    return [_measure_of(field.type) for field in batch.schema]


def _weight_of(batch: Any, measures: Sequence[Measure]) -> int:
    return sum(
        measure(chunk)
        for column, measure in zip(batch.columns, measures, strict=True)
        for chunk in getattr(column, "chunks", [column])
    )


def _measure_of(kind: pa.DataType) -> Measure:
    """Return the function that estimates the bytes that Python takes for the values of a column of this type."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        stored = _measure_of(kind.storage_type)
        return lambda column: stored(column.storage)
    if _is(kind, ("dictionary",)):
        return partial(_of_dictionary, texts=_is(kind.value_type, _TEXTS))
    if _is(kind, _TEXTS):
        return lambda column: VALUE * len(column) + (_sum(_lengths(column)) if len(column) else 0)
    inner = [_measure_of(kind.field(index).type) for index in range(kind.num_fields)]
    if _is(kind, ("struct",)):
        return lambda column: (
            ROW * len(column) + sum(part(one) for part, one in zip(inner, column.flatten(), strict=True))
        )
    if _is(kind, ("map",)):
        entries = _measure_of(kind.key_type), _measure_of(kind.item_type)
        return partial(_of_map, entries=entries)
    if _is(kind, _LISTS):
        return lambda column: VALUE * len(column) + inner[0](column.flatten())
    return lambda column: VALUE * len(column)


def _of_dictionary(column: Any, texts: bool) -> int:
    return VALUE * len(column) + (_sum(_lengths(column.dictionary).cast("int64").take(column.indices)) if texts else 0)


def _of_map(column: Any, entries: Sequence[Measure]) -> int:
    begin, end = (column.offsets[at].as_py() for at in (0, -1)) if len(column) else (0, 0)
    parts = zip(entries, (column.keys, column.items), strict=True)
    return VALUE * len(column) + sum(measure(part.slice(begin, end - begin)) for measure, part in parts)


def _lengths(column: Any) -> Any:
    """Bytes of each text."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if _is(column.type, _VIEWS):  # there is no function that measures them
        column = column.cast(pa.large_string() if column.type == pa.string_view() else pa.large_binary())
    return pc.binary_length(column)


def _sum(numbers: Any) -> int:
    import pyarrow.compute as pc

    return int(pc.sum(numbers).as_py() or 0)
