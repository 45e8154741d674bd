"""Small copies of samples' pictures, inside of the page."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

from anytron.base.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

LONGEST_SIDE = 224
"""Pixels."""


def embed_pictures(directory: Path, names: Iterable[str], room: int) -> dict[str, str]:
    """Give pictures as ``data:`` addresses, in this order as many as there is room for.

    Args:
        directory: Of the run.
        names: Below the directory.
        room: Characters.
    """
    from anytron.task.data.vision import read_picture  # Pillow

    found: dict[str, str] = {}
    for name in dict.fromkeys(names):
        if (directory / name).is_symlink():
            continue
        try:
            small = read_picture(directory / name, name)
        except DataError:
            continue
        small.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
        file = io.BytesIO()
        small.save(file, "JPEG", quality=80)
        address = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
        room -= len(address)
        if room < 0:
            break
        found[name] = address
    return found
