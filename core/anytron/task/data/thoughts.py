"""Recognise the tags around a model's thoughts (``<think>``), and an opening tag at the end of a prompt."""

from __future__ import annotations

import re

_NAMES = "(?:think|thinking|thought|reasoning)"
_OPENED = re.compile(rf"<{_NAMES}>\s*\Z")
_MARK = re.compile(rf"</?{_NAMES}>")


def opened(prompt: str) -> str:
    r"""Return the opening tag of thought at the end of a prompt, for example ``<think>\n``; else ""."""
    found = _OPENED.search(prompt)
    return found[0] if found else ""


def is_mark(token: str) -> bool:
    """Return whether a token is an opening or a closing tag of thought."""
    return _MARK.fullmatch(token) is not None
