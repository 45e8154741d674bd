"""Text that models and tools wrote, for a terminal: nothing in it moves the cursor or turns the line around."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")
_UNSEEN = re.compile("[\x80-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


def visible(text: str, encoding: str = "utf-8") -> str:
    """Escape what has no picture of its own, and what an encoding cannot write; ends of lines stay.

    Args:
        text: Any text, halves of surrogate pairs included.
        encoding: Of the terminal.
    """
    text = _CONTROL.sub(lambda found: " " if found[0] == "\t" else f"\\x{ord(found[0]):02x}", text)
    text = _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return text.encode(encoding, "backslashreplace").decode(encoding)
