"""Hostile files of Parquet and Arrow, and hostile datasets: each writes it into a folder and gives ``data.options``."""

from __future__ import annotations

import io
import json
import os
import shutil

import datasets
import pyarrow as pa
import pyarrow.parquet

from tests.core.task.data import thrift
from tests.core.task.data.hostile_texts import EVIL, file, sparse, special

SOUND = {"prompt": ["21>", "43>", "65>"], "answer": ["12", "34", "56"]}
BIG = (1 << 62) - 1


def parquet_bytes(table, **options):
    written = io.BytesIO()
    pa.parquet.write_table(pa.table(table) if isinstance(table, dict) else table, written, **options)
    return written.getvalue()


def parquet(table, **options):
    return file(lambda: parquet_bytes(table() if callable(table) else table, **options), "rows.parquet")


def lie(path, value, **options):
    """A sound file whose footer has another value at a place."""

    def content():
        fields, before = thrift.footer_of(parquet_bytes(SOUND, **options))
        thrift.put(fields, path, value)
        return thrift.with_footer(fields, before)

    return file(content, "rows.parquet")


def changed(change, **options):
    """A sound file whose bytes go through a function."""
    return file(lambda: change(parquet_bytes(SOUND, **options)), "rows.parquet")


def repeated(value, indices):
    """A column that Parquet writes as a dictionary of one value."""
    return pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32()), pa.array([value]))


def bomb(rows, size, column="prompt", plain=False):
    """A file of 2 kB whose rows have so many bytes each; a plain one is read as texts, any other as a dictionary."""

    def table():
        columns = {"prompt": repeated("21>", [0] * rows), "answer": repeated("12", [0] * rows)}
        return pa.table({**columns, column: repeated("1" * size, [0] * rows)})

    return parquet(table, compression="zstd", store_schema=not plain)


def list_bomb(items, size, plain=False, prompt=("1>",)):
    """Rows that are lists of one value, again and again."""

    def table():
        values = repeated("1" * size, [0] * items)
        column = pa.ListArray.from_arrays(pa.array([0, items], pa.int32()), values)
        return pa.table({"prompt": list(prompt), "answer": ["1"], "x": column})

    return parquet(table, compression="zstd", store_schema=not plain)


def deep_type(levels, kind=pa.list_):
    value = pa.int32()
    for _ in range(levels):
        value = pa.list_(value) if kind is pa.list_ else pa.struct([("a", value)])
    return value


def deep(levels, kind=pa.list_):
    """Columns of lists in lists, or objects in objects."""

    def table():
        schema = pa.schema([("prompt", pa.string()), ("answer", pa.string()), ("x", deep_type(levels, kind))])
        return pa.table([["1>"], ["1"], pa.nulls(1, schema.field("x").type)], schema=schema)

    return parquet(table)


def odd_columns():
    """Values that are no text or number: what becomes of them is in the test."""
    return pa.table({
        "prompt": ["1>"], "answer": ["1"],
        "zone": pa.array([0], pa.timestamp("s", "Nowhere/Nothing")),
        "late": pa.array([1 << 62], pa.timestamp("ms")),
    })  # fmt: skip


def rows_of_nothing(count):
    return pa.table({"prompt": repeated("1>", [0] * count), "answer": repeated("1", [0] * count)})


PARQUET = {
    "empty": (file(b"", "rows.parquet"), "prompts cannot be read"),
    "JSON": (file(b'{"prompt": "1>"}\n', "rows.parquet"), "prompts cannot be read"),
    "magic numbers alone": (file(b"PAR1PAR1", "rows.parquet"), "prompts cannot be read"),
    "an encrypted footer's magic": (changed(lambda data: data[:-4] + b"PARE"), "prompts cannot be read"),
    "cut short": (changed(lambda data: data[:-1]), "prompts cannot be read"),
    "its first half": (changed(lambda data: data[: len(data) // 2]), "prompts cannot be read"),
    "a footer of 2 GB": (changed(lambda data: data[:-8] + b"\xff\xff\xff\x7fPAR1"), "prompts cannot be read"),
    "a footer of nothing": (changed(lambda data: data[:-8] + bytes(4) + b"PAR1"), "prompts cannot be read"),
    "pages of zeros": (changed(lambda data: data[:4] + bytes(60) + data[64:]), "prompts cannot be read"),
    "1 TiB": (sparse(b"PAR1", 1 << 40, "rows.parquet"), "prompts cannot be read"),
    "2 ** 62 rows": (lie((3,), BIG), ""),
    "2 ** 62 rows in a group": (lie((4, 0, 3), BIG), ""),
    "less than no rows in a group": (lie((4, 0, 3), -5), ""),
    "a group without bytes": (lie((4, 0, 2), 0), None),
    "a group of less than no bytes": (lie((4, 0, 2), -BIG), None),
    "2 ** 62 values in a column": (lie((4, 0, 1, 0, 3, 5), BIG), ""),
    "a compression that is none": (lie((4, 0, 1, 0, 3, 4), 99), "prompts cannot be read"),
    "a compression that is another": (lie((4, 0, 1, 0, 3, 4), 2), "prompts cannot be read"),
    "a column of 2 ** 62 bytes": (lie((4, 0, 1, 0, 3, 7), BIG), "prompts cannot be read"),
    "a column behind the end": (lie((4, 0, 1, 0, 3, 9), BIG, use_dictionary=False), "prompts cannot be read"),
    "a dictionary before the beginning": (lie((4, 0, 1, 0, 3, 11), -9), ""),
    "a type that is none": (lie((2, 1, 1), 99), "prompts cannot be read"),
    "a schema of 2 ** 30 children": (lie((2, 0, 5), 1 << 30), "prompts cannot be read"),
    "a column repeated that is not": (lie((2, 1, 3), 2), ""),
    "60 rows of 50 MB in 2 kB": (bomb(60, 50 << 20), "holds far more than its size"),
    "60 rows of 50 MB in 2 kB, read as texts": (bomb(60, 50 << 20, plain=True), "rows.parquet.*more memory"),
    "60 rows of 5 MB in 2 kB, read as texts": (bomb(60, 5 << 20, plain=True), "holds far more than its size"),
    "one row of 200 MB": (bomb(1, 200 << 20), "too long.*row 1 .row group 0"),
    "a row of 100 MB behind a sound one": (
        parquet(lambda: pa.table({"prompt": ["1>", "1" * (100 << 20)], "answer": ["1", "1"]}), compression="zstd"),
        "row 2.*row group 0",
    ),
    "1,000 rows of 2 MB in a column": (bomb(1000, 2 << 20, "x"), "rows.parquet"),
    "100,000 rows of 100 kB in a column": (bomb(100_000, 100_000, "x"), "rows.parquet"),
    "a list of one value, 100,000 times": (list_bomb(100_000, 100_000), "rows.parquet.*row 1"),
    "a list of one value, 100,000 times, read as texts": (list_bomb(100_000, 100_000, plain=True), "more memory"),
    "a list of 20 million nothings": (
        parquet(lambda: pa.table({"prompt": ["1>"], "answer": ["1"], "x": pa.array([[None] * 20_000_000])})),
        "row 1",
    ),
    "10 million rows of nothing": (parquet(lambda: rows_of_nothing(10_000_000)), "rows.parquet"),
    "no columns": (parquet(lambda: pa.table({})), "no prompts"),
    "no rows": (parquet({"prompt": pa.array([], pa.string())}), "no prompts"),
    "100,000 columns": (
        parquet(lambda: pa.table([[1]] * 100_000, names=[str(n) for n in range(100_000)])), "too many columns"),
    "a column twice": (
        parquet(lambda: pa.table([["1>"], ["2>"]], names=["prompt", "prompt"])), "names of their own"),
    "5,000 groups": (parquet(lambda: pa.table({n: v * 2000 for n, v in SOUND.items()}), row_group_size=1), None),
    "lists in each other, 40 levels": (deep(40), "more than 32 levels"),
    "lists in each other, 20 levels": (deep(20), None),
    "lists in each other, 5,000 levels": (deep(5000), "prompts cannot be read"),
    "objects in each other, 5,000 levels": (deep(5000, pa.struct), "prompts cannot be read"),
    "a time zone that is none": (parquet(odd_columns), "prompts cannot be read"),
    "columns with escape sequences": (parquet({EVIL: ["1"], "x": [EVIL]}), "no column"),
    "escape sequences": (parquet({"prompt": [EVIL], "answer": ["1"], EVIL: [EVIL]}), None),
    "a name with escape sequences": (file(b"PAR1", f"{EVIL}.parquet"), "prompts cannot be read"),
    "a pipe": (special(os.mkfifo, "rows.parquet"), "or not a regular file"),
    "text that is not valid Unicode": (
        parquet(lambda: {"prompt": pa.StringArray.from_buffers(1, pa.array([0, 1], pa.int32()).buffers()[1],
                                                               pa.py_buffer(b"\xff"))}), "Unicode"),
}  # fmt: skip


def arrow(table, **options):
    """A stream of Arrow's messages, as the library datasets writes it."""

    return file(lambda: arrow_bytes(table() if callable(table) else table, **options), "rows.arrow")


def arrow_bytes(table=SOUND, **options):
    written = io.BytesIO()
    made = pa.table(table) if isinstance(table, dict) else table
    with pa.ipc.new_stream(written, made.schema, options=pa.ipc.IpcWriteOptions(**options)) as stream:
        stream.write_table(made)
    return written.getvalue()


def replaced(old, new, count=-1):
    return file(lambda: arrow_bytes().replace(old, new, count), "rows.arrow")


def saved(change):
    """A sound dataset whose folder goes through a function."""

    def make(folder):
        datasets.Dataset.from_dict(SOUND).save_to_disk(folder / "set")
        change(folder / "set")
        return {"path": str(folder / "set")}

    return make


def fields(name, **values):
    def change(folder):
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **values}))

    return change


def instead(name, put):
    def change(folder):
        (folder / name).unlink()
        put(folder / name)

    return change


def far_away(folder):
    """The data lie outside of the folder."""
    shutil.copy(folder / "data-00000-of-00001.arrow", folder.parent / "x.arrow")
    fields("state.json", _data_files=[{"filename": "../x.arrow"}])(folder)


ARROW = {
    "empty": (file(b"", "rows.arrow"), "prompts cannot be read"),
    "a file and no stream": (file(b"ARROW1\0\0" + bytes(100), "rows.arrow"), "prompts cannot be read"),
    "cut short": (file(lambda: arrow_bytes()[:-200], "rows.arrow"), ""),
    "a message of 2 GB": (replaced(b"\xff\xff\xff\xff", b"\xff\xff\xff\xff\xff\xff\xff\x7f", 1), "cannot be read"),
    "1 TiB": (sparse(b"\xff\xff\xff\xff", 1 << 40, "rows.arrow"), ""),
    "offsets behind the end": (
        replaced(b"\3\0\0\0\6\0\0\0\x09", b"\3\0\0\0\6\0\0\x7f\x09"), "prompts cannot be read"),
    "offsets before the beginning": (replaced(b"\3\0\0\0\6\0\0\0\x09", b"\3\0\0\0\6\0\0\xff\x09"), "cannot be read"),
    "letters that are none": (replaced(b"21>", b"\xff\xff>"), "prompts cannot be read"),
    "a dictionary of one value, 60 times": (
        arrow(lambda: {"prompt": repeated("1" * (50 << 20), [0] * 60), "answer": ["1"] * 60}), "rows.arrow|No prompt"),
    "1,000 times a value of 50 MB": (
        arrow(lambda: {"prompt": ["1>"] * 1000, "answer": ["1"] * 1000, "x": repeated("1" * (50 << 20), [0] * 1000)}),
        "rows.arrow"),
    "a run of 10 million rows": (
        arrow(lambda: {"prompt": pa.RunEndEncodedArray.from_arrays(pa.array([10_000_000], pa.int32()), ["1>"])}),
        "rows.arrow"),
    "10 million rows of null": (arrow(lambda: {"prompt": pa.nulls(10_000_000)}), "rows.arrow"),
    "compressed, 200 MB": (
        arrow(lambda: {"prompt": ["1" * (200 << 20)], "answer": ["1"]}, compression="zstd"), "rows.arrow.*row 1"),
    "lists in each other, 50 levels": (
        arrow(lambda: {"prompt": ["1>"], "x": pa.nulls(1, deep_type(50))}), "more than 32 levels"),
    "a column twice": (arrow(lambda: pa.table([["1>"], ["2>"]], names=["prompt", "prompt"])), "cannot be read|own"),
    "escape sequences": (arrow({EVIL: [EVIL]}), "no column"),
    "a folder of nothing": (special(lambda path: path.mkdir(), "set"), "prompts cannot be read"),
    "a state that is a pipe": (saved(instead("state.json", os.mkfifo)), "neither a file nor a link"),
    "data that are a pipe": (saved(instead("data-00000-of-00001.arrow", os.mkfifo)), "neither a file nor a link"),
    "data that are a device": (
        saved(instead("data-00000-of-00001.arrow", lambda path: path.symlink_to("/dev/zero"))), "nor a link to one"),
    "a state of 100,000 brackets": (
        saved(lambda folder: (folder / "state.json").write_text("[" * 100_000)), "prompts cannot be read"),
    "a state of 1 TiB": (saved(lambda folder: os.truncate(folder / "state.json", 1 << 40)), "prompts cannot be read"),
    "data that lie elsewhere": (saved(far_away), "leaves|outside"),
    "data of the system": (saved(fields("state.json", _data_files=[{"filename": "/etc/passwd"}])), "leaves|outside"),
    "columns that are none": (
        saved(fields("dataset_info.json", features={"x": {"_type": EVIL}})), "prompts cannot be read"),
    "a format that is none": (saved(fields("state.json", _format_type=EVIL)), "prompts cannot be read"),
    "a split of escape sequences": (
        lambda folder: saved(lambda _: None)(folder) | {"split": EVIL}, "no such split"),
}  # fmt: skip
