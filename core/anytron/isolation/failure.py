"""Why a user's code gave no usable answer."""

from __future__ import annotations

import traceback
from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """Why there is no usable answer.

    Attributes:
        what: As a sentence.
        why: The cause: a traceback, what was returned, how a process ended.
        fix: What would help.
        ends: The process had better be replaced: its memory is full, or the code wanted to end it.
    """

    what: str
    why: str
    fix: str = ""
    ends: bool = False


def traced(error: BaseException) -> str:
    """Give the traceback of what a user's code raised."""
    return "".join(traceback.format_exception(error)).rstrip()
