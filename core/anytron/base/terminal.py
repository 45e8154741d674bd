"""Escape terminal output, so that no text can move the cursor, reverse the direction of a line or hide other text.

Names of models, tensors, files and columns, keys, responses and exceptions may come from files that somebody else
wrote. A terminal obeys escape sequences in them, even when a log is looked at later.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import TextIO

_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")
_UNSEEN = re.compile("[\x80-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


def visible(text: str, encoding: str = "utf-8") -> str:
    """Escape unprintable characters and those that the encoding cannot write; keep line feeds, make tabs spaces.

    Args:
        text: Any text, halves of surrogate pairs included.
        encoding: The terminal's encoding.
    """
    text = _CONTROL.sub(lambda found: " " if found[0] == "\t" else f"\\x{ord(found[0]):02x}", text)
    text = _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return text.encode(encoding, "backslashreplace").decode(encoding)


def one_line(text: str) -> str:
    """Escape characters that are not printable, and line ends too: the text stays on its line."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


class VisibleStream:
    """A text stream that escapes what is not printable, in ``print``, warnings, logs and tracebacks alike.

    A carriage return becomes the end of a line. The stream has no ``buffer``, through which bytes could bypass it.

    Attributes:
        stream: The underlying stream. A console writes its colours and cursor movements to it.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write the visible text; return the length of the given text."""
        lines = text.replace("\r\n", "\n").replace("\r", "\n")
        self.stream.write(visible(lines, self.stream.encoding or "utf-8"))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write each of the lines."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":
            raise AttributeError(name)
        return getattr(self.stream, name)


def make_output_visible() -> None:
    """Make stdout and stderr of this process escape what is not printable, from now on."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, VisibleStream):  # None: closed before the start
            setattr(sys, name, VisibleStream(stream))
