"""Hostile files of JSONL and CSV, and hostile names: each writes its files into a folder and gives ``data.options``."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import socket

EVIL = "\x1b]0;owned\x07\x1b[2J\r\x9b1A\u202etxt"
ROW = b'{"prompt": "21>", "answer": "12"}\n'


def file(content, name="rows.jsonl"):
    """A file, and the option that names it."""

    def make(folder):
        (folder / name).write_bytes(content() if callable(content) else content)
        return {"path": str(folder / name)}

    return make


def row(**columns):
    """One JSON object with a sound prompt."""
    return file(json.dumps({"prompt": "21>", "answer": "12", **columns}).encode())


def sparse(beginning, size, name="rows.jsonl"):
    """A file that takes no place on the disk."""

    def make(folder):
        (folder / name).write_bytes(beginning)
        os.truncate(folder / name, size)
        return {"path": str(folder / name)}

    return make


def special(put, name="rows.jsonl"):
    """Whatever is no file."""

    def make(folder):
        put(folder / name)
        return {"path": str(folder / name)}

    return make


def listening(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def linked_to_each_other(folder):
    """Folders in which a pattern finds 2 ** 40 paths."""
    for name in ("a", "b"):
        (folder / name).symlink_to(".")
    (folder / "rows.jsonl").write_bytes(ROW)
    return {"path": f"{folder}/**/*.jsonl"}


def nested(levels, value="1"):
    return b'{"prompt": "21>", "answer": ' + b'{"a":' * levels + value.encode() + b"}" * levels + b"}"


JSONL = {
    "empty": (file(b""), "no prompts"),
    "blank lines": (file(b"\n\r\n \n" * 1000), "no prompts"),
    "cut short": (file(ROW[:-4]), "is not JSON"),
    "100,000 brackets": (file(b"[" * 100_000), "nested too deeply"),
    "100,000 levels": (file(nested(100_000)), "nested too deeply"),
    "50 levels": (file(nested(50)), "more than 32 levels"),
    "a number of 5,000 digits": (file(ROW[:-2] + b', "x": ' + b"9" * 5000 + b"}"), "not JSON"),
    "a number of 4,000 digits": (file(ROW[:-2] + b', "x": ' + b"9" * 4000 + b"}"), None),
    "an exponent of 10 digits": (file(ROW[:-2] + b', "x": 1e9999999999}'), None),
    "NaN and infinity": (file(ROW[:-2] + b', "x": [NaN, Infinity, -Infinity]}'), None),
    "a key twice": (file(b'{"prompt": "1>", "prompt": "2>", "answer": "12"}'), None),
    "half a letter": (file(rb'{"prompt": "1\ud83d>", "answer": "12"}'), "not valid Unicode.*prompt has half"),
    "half a letter in a key": (file(rb'{"prompt": "1>", "\uDFFF": 1, "answer": "12"}'), "not valid Unicode"),
    "a mark of byte order": (file(b"\xef\xbb\xbf" + ROW), None),
    "two marks of byte order": (file(b"\xef\xbb\xbf" * 2 + ROW), "not JSON"),
    "UTF-16": (file(ROW.decode().encode("utf-16")), "rows.jsonl:1.*utf-8"),
    "UTF-32": (file(ROW.decode().encode("utf-32-be")), "not JSON"),
    "Latin-1": (file(b'{"prompt": "\xe4"}'), "utf-8"),
    "letters that are too long": (file(b'{"prompt": "\xc0\xaf"}'), "utf-8"),
    "NULs": (file(b"\0" * 100_000), "not JSON"),
    "a NUL in the text": (row(prompt="2\0001>", answer="1\0002"), None),
    "a key that looks like plain data's mark": (row(x={"\0path": "/etc/passwd"}, y={"\0bytes": 7}), None),
    "a key that looks like a date": (row(x=[{"\0date": "never"}, {"\0decimal": [1]}, {"\0timedelta": 5}]), None),
    "escape sequences": (row(**{EVIL: EVIL, "prompt": EVIL, "id": EVIL}), None),
    "escape sequences and no prompt": (file(json.dumps({EVIL: EVIL}).encode()), "no column 'prompt'"),
    "escape sequences that are no JSON": (file(EVIL.encode()), "not JSON"),
    "an id of a million letters": (row(id="x" * 1_000_000), None),
    "the id is a list": (row(id=[1, {"a": None}]), None),
    "a list": (file(b"[1]"), "is not an object"),
    "null": (file(b"null"), "is not an object"),
    "a JSON array of rows": (file(json.dumps([{"prompt": "1>"}] * 3, indent=1).encode()), "not JSON"),
    "the prompt is null": (row(prompt=None), "neither a string nor a list"),
    "the prompt is empty": (row(prompt=""), "no tokens"),
    "the prompt is true": (row(prompt=True), "neither a string"),
    "the prompt is a number without end": (file(b'{"prompt": [1e999]}'), "neither a string"),
    "token ids of 40 digits": (row(prompt=[10**40]), "outside of the model.s vocabulary"),
    "token ids below zero": (row(prompt=[-1]), "outside of the model.s vocabulary"),
    "token ids are truth values": (row(prompt=[True]), "neither a string"),
    "a million token ids": (row(prompt=[1] * 1_000_000), "Every prompt of a source was left out"),
    "100,000 columns": (
        file(lambda: json.dumps(dict.fromkeys(map(str, range(100_000)), 0)).encode()), "too many columns"),
    "100,000 keys in an object": (
        file(lambda: ROW[:-2] + b', "x": {' + b", ".join(b'"%d": 0' % n for n in range(100_000)) + b"}}"), None),
    "ten million lists": (file(lambda: ROW[:-2] + b', "x": [' + b"[]," * 10_000_000 + b"[]]}"), ""),
    "a prompt of 20 MB": (file(lambda: b'{"prompt": "' + b"1" * 20_000_000 + b'", "answer": ""}'), ""),
    "a line of 80 MB": (sparse(b'{"prompt": "', 80 << 20), "line of the prompts is too long.*67108864"),
    "1 TiB without content": (sparse(b"", 1 << 40), "too long"),
    "1 TiB behind a row": (sparse(ROW, 1 << 40), r"too long.*rows\.jsonl:2"),
    "a pipe": (special(os.mkfifo), "no such file, or not a regular file"),
    "a socket": (special(listening, "s"), "no such file, or not a regular file"),
    "a link to a device that never ends": (special(lambda path: path.symlink_to("/dev/zero")), "or not a regular file"),
    "a link to a terminal": (special(lambda path: path.symlink_to("/dev/tty")), "or not a regular file"),
    "a link to itself": (special(lambda path: path.symlink_to(path.name)), "or not a regular file"),
    "a link to nowhere": (special(lambda path: path.symlink_to("nowhere")), "or not a regular file"),
    "a link to a file of the system": (special(lambda path: path.symlink_to("/etc/passwd")), "not JSON"),
    "a link to the process's memory": (special(lambda path: path.symlink_to("/proc/self/mem")), ""),
    "a folder": (special(lambda path: path.mkdir()), "it is a folder"),
    "a name of 5,000 letters": (lambda folder: {"path": f"{folder}/{'x' * 5000}"}, "or not a regular file|too long"),
    "a name with a NUL": (lambda folder: {"path": f"{folder}/a\0b"}, ""),
    "a name with escape sequences": (file(b"{", f"{EVIL}.jsonl"), "not JSON"),
    "a pattern over folders that hold each other": (linked_to_each_other, "prompts cannot be read"),
    "gzip": (file(lambda: gzip.compress(ROW * 100)), "compressed"),
    "xz": (file(lambda: lzma.compress(ROW * 100)), "compressed"),
    "zstandard": (file(b"\x28\xb5\x2f\xfd" + bytes(100)), "compressed"),
    "a gzip bomb": (file(lambda: gzip.compress(bytes(20_000_000))), "compressed"),
    "messages that are none": (row(prompt=[{"role": 1}]), "no usable role or content"),
    "a message of 20,000 parts": (
        row(prompt=[{"role": "user", "content": [{"type": "text", "text": "1"}] * 20_000}]), ""),
    "20,000 messages": (row(prompt=[{"role": "user", "content": "1"}, {"role": "assistant", "content": "1"}] * 10_000
                            + [{"role": "user", "content": "1"}]), ""),
    "messages with escape sequences": (row(prompt=[{"role": EVIL, "content": EVIL}]), ""),
    "tools that are no JSON": (
        row(prompt=[{"role": "user", "content": "1"}], tools="[" * 100_000), "tools.*nested too deeply"),
    "images for a model that takes none": (row(images="../../etc/passwd"), "leads out of its folder"),
}  # fmt: skip
CSV = {
    "empty": (file(b"", "rows.csv"), "no prompts"),
    "a quote that never ends": (file(b'prompt,answer\n21>,"' + b"1\n" * 100_000, "rows.csv"), "not CSV"),
    "100,000 columns": (
        file(lambda: ",".join(["prompt", "answer", *map(str, range(100_000))]).encode() + b"\n1,2\n", "rows.csv"),
        "too many columns",
    ),
    "columns without a name": (file(b"prompt,,\n1,2,3\n", "rows.csv"), "need different names"),
    "columns with escape sequences": (file(f"{EVIL},{EVIL}x\n1,2\n".encode(), "rows.csv"), "CSV|no column"),
    "NULs": (file(b"prompt\n" + b"\0" * 1000, "rows.csv"), ""),
    "a field of 80 MB": (sparse(b'prompt\n"1', 80 << 20, "rows.csv"), "too long"),
    "1 TiB": (sparse(b"prompt,answer\n1>,1\n", 1 << 40, "rows.csv"), "too long"),
    "half a letter": (file(b"prompt\n\xed\xa0\x80\n", "rows.csv"), "utf-8"),
    "UTF-16": (file("prompt\n1".encode("utf-16"), "rows.csv"), "utf-8"),
    "carriage returns alone": (file(b"prompt,answer\r1>,1\r2>,2\r", "rows.csv"), "CSV"),
    "many short lines": (file(b"prompt,answer\n" + b"\n" * 100_000 + b"1>,1", "rows.csv"), None),
    "a pipe": (special(os.mkfifo, "rows.csv"), "or not a regular file"),
}  # fmt: skip
