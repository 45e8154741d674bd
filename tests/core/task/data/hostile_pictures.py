"""Hostile pictures in rows: each writes what it has into a folder and gives ``data.options``."""

from __future__ import annotations

import io
import json
import os
import struct
import zlib

import pyarrow as pa
import pyarrow.parquet
from PIL import Image

from tests.core.task.data.hostile_texts import EVIL

PROMPT = "<|vision_start|><|image_pad|><|vision_end|>?"
PNG = b"\x89PNG\r\n\x1a\n"


def encoded(form="PNG", size=(32, 32), mode="RGB", **options):
    written = io.BytesIO()
    Image.effect_noise(size, 90).convert(mode).save(written, form, **options)
    return written.getvalue()


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, *before, colour=2, data=b""):
    """A PNG file whose header says so, with chunks before its pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0))
    return PNG + header + b"".join(before) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def compressed_chunk(kind, name, size):
    return chunk(kind, name + b"\0\0" + zlib.compress(bytes(size), 9))


def flat(width, height):
    """A picture of one colour."""
    pack = zlib.compressobj(9)
    line = bytes(1 + 3 * width)
    data = b"".join(pack.compress(line) for _ in range(height)) + pack.flush()
    return PNG + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)) + chunk(b"IDAT", data)


def rows(*images):
    """JSON lines; each image is a path."""

    def make(folder):
        lines = [json.dumps({"prompt": PROMPT, "answer": "1", "images": image}) for image in images]
        (folder / "rows.jsonl").write_text("\n".join(lines))
        return {"path": str(folder / "rows.jsonl")}

    return make


def named(content, name="a.png"):
    """A row that names a file beside it."""

    def make(folder):
        (folder / name).write_bytes(content() if callable(content) else content)
        return rows(name)(folder)

    return make


def placed(put, name="a.png"):
    """A row that names whatever is no file."""

    def make(folder):
        put(folder / name)
        return rows(name)(folder)

    return make


def enlarged(size):
    """A sound picture with a hole behind it, which takes no place on the disk."""

    def put(path):
        path.write_bytes(encoded())
        os.truncate(path, size)

    return placed(put)


def table(*images):
    """A Parquet file with the bytes of pictures, as Hugging Face's."""

    def make(folder):
        found = [{"bytes": image() if callable(image) else image, "path": None} for image in images]
        columns = {"prompt": [PROMPT] * len(found), "answer": ["1"] * len(found), "images": found}
        pa.parquet.write_table(pa.table(columns), folder / "rows.parquet")
        return {"path": str(folder / "rows.parquet")}

    return make


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n(x) (w) file closefile showpage\n"
UNREADABLE = "An image cannot be read"
PICTURES = {
    "sound": (named(encoded()), None),
    "no picture": (named(b"no picture"), UNREADABLE),
    "empty": (named(b""), UNREADABLE),
    "SVG": (named(SVG, "a.svg"), UNREADABLE),
    "EPS": (named(EPS, "a.eps"), UNREADABLE),
    "SVG that is named PNG": (named(SVG), UNREADABLE),
    "a JPEG cut short": (named(lambda: encoded("JPEG", (200, 200))[:2000], "a.jpg"), UNREADABLE),
    "a GIF cut short": (named(lambda: encoded("GIF", (200, 200), "P")[:2000], "a.gif"), UNREADABLE),
    "a WebP cut short": (named(lambda: encoded("WEBP", (200, 200))[:2000], "a.webp"), UNREADABLE),
    "a TIFF cut short": (named(lambda: encoded("TIFF", (200, 200))[:2000], "a.tif"), UNREADABLE),
    "a bomb of text": (named(lambda: png(32, 32, *[compressed_chunk(b"zTXt", b"a", 60 << 20)] * 4)), UNREADABLE),
    "a bomb of a colour profile": (
        named(lambda: png(32, 32, compressed_chunk(b"iCCP", b"a", 200 << 20))), UNREADABLE),
    "60,000 x 60,000": (named(png(60_000, 60_000)), "limit"),
    "2 ** 31 - 1 pixels wide": (named(png(2**31 - 1, 2**31 - 1)), UNREADABLE),
    "no pixels": (named(png(0, 0)), UNREADABLE),
    "1 x 60,000,000": (named(png(1, 60_000_000)), UNREADABLE),
    "8,192 x 8,192 of one colour": (named(lambda: flat(8192, 8192)), ""),
    "a GIF of 65,535 x 65,535": (
        named(b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b"\x2c" + bytes(9), "a.gif"), UNREADABLE),
    "1 TiB": (placed(lambda path: (path.write_bytes(b""), os.truncate(path, 1 << 40))), UNREADABLE),
    "1 TiB behind a sound picture": (enlarged(1 << 40), UNREADABLE),
    "a pipe": (placed(os.mkfifo), UNREADABLE),
    "a device": (placed(lambda path: path.symlink_to("/dev/zero")), "leads out of its folder"),
    "a link to itself": (placed(lambda path: path.symlink_to(path.name)), "cannot be used|cannot be read"),
    "a folder": (placed(lambda path: path.mkdir()), UNREADABLE),
    "a file of the system": (rows("/etc/passwd"), "leads out of its folder"),
    "a path that leads up": (rows("../../../etc/passwd"), "leads out of its folder"),
    "a link that leads out": (placed(lambda path: path.symlink_to("/etc/passwd")), "leads out of its folder"),
    "a path with a NUL": (rows("a\0.png"), "path of an image cannot be used"),
    "a path of 100,000 letters": (rows("x" * 100_000), "cannot be used|cannot be read"),
    "a path with escape sequences": (rows(EVIL), UNREADABLE),
    "an address": (rows("https://example.org/a.png"), UNREADABLE),
    "20,000 images in a row": (rows(["a.png"] * 20_000), "do not fit"),
    "an image that is a number": (rows(7), "neither a path nor a picture"),
    "in Parquet": (table(encoded), None),
    "in Parquet, no picture": (table(b"no picture"), UNREADABLE),
    "in Parquet, EPS": (table(EPS), UNREADABLE),
    "in Parquet, 60,000 x 60,000": (table(png(60_000, 60_000)), "limit"),
}  # fmt: skip
