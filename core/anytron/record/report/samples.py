"""Choose samples for a report: from the first steps, the last steps and some in between, as many as fit."""

from __future__ import annotations

import json
import math
import os
import re
from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, Any

from anytron.record.report.history import number_of, parsed, step_of
from anytron.record.report.run import SAMPLES
from anytron.record.report.settings import shortened
from anytron.record.tracking.lines import backwards

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO, TypeAlias

    from anytron.record.report.run import Run

    Placed: TypeAlias = tuple[int, dict[str, Any]]
    """Offset of a sample in the file, and the sample."""

ENDS = 5
"""Number of first, and of last, steps of a run that are chosen before all other steps."""
LONGEST = 12_000
"""Largest number of characters of a prompt or response that are shown."""
_PICTURE = re.compile(r"images/\d+-([A-Za-z0-9_.-]+-)?\d+\.png")


def choose_samples(run: Run, room: int) -> dict[str, Any]:
    """Read as many samples of a run as fit, of the most important steps first; the rest of the file is not read.

    Args:
        run: The run.
        room: Largest size of the samples as JSON, in bytes; at least one sample is returned.

    Returns:
        ``samples``: dictionaries with step, id, prompt, response, tokens, finished and reward, and, if there are any,
        errors, images and turns, in the order of the file; ``logged_bytes``: size of the file; ``left_out``: whether
        the file has more samples.
    """
    chosen: list[tuple[int, dict[str, Any]]] = []
    path, size, left_out = run.path / SAMPLES, 0, False
    if path.is_file():
        with path.open("rb") as file:
            found = SampleFile(file)
            size = found.size
            for offset, record in chain.from_iterable(found.by_importance()):
                sample = _shown(record)
                room -= len(json.dumps(sample))
                if left_out := room < 0 and bool(chosen):
                    break
                chosen.append((offset, sample))
        run.count_unreadable(SAMPLES, len(found.broken), cut_short=found.cut_short)
    samples = [sample for _, sample in sorted(chosen, key=lambda one: one[0])]
    return {"samples": samples, "logged_bytes": size, "left_out": left_out}


class SampleFile:
    """The samples of a run, read step by step from any place of the file. Samples of a step are side by side.

    Args:
        file: The file.

    Attributes:
        size: Bytes of the file.
        broken: Offsets of lines that were read and are not samples.
        cut_short: Whether the file ends in the middle of a line, as far as it was read.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.size = file, file.seek(0, os.SEEK_END)
        self.broken: set[int] = set()
        self.cut_short = False

    def by_importance(self) -> Iterator[list[Placed]]:
        """Yield the samples of one step after another: first and last steps in turn, then always the middle of a gap.

        Gaps are halved in turn, so that the chosen steps are evenly spread over the file, however many are taken.
        """
        begin, end = 0, self.size
        for _ in range(ENDS):
            if begin < end:
                found, begin = self._first_step(begin, end)
                yield found
            if begin < end:
                found, end = self._last_step(begin, end)
                yield found
        gaps = deque([(begin, end)])
        while gaps:
            begin, end = gaps.popleft()
            if begin < end:
                middle = self._next_step((begin + end) // 2, end)
                place = middle if middle < end else begin
                found, after = self._first_step(place, end)
                yield found
                gaps.extend([(begin, place), (after, end)])

    def _first_step(self, begin: int, end: int) -> tuple[list[Placed], int]:
        """Read the samples of the first step of a part of the file, and find where the next step begins."""
        found: list[Placed] = []
        self._file.seek(begin)
        while begin < end and (line := self._file.readline()):
            record = self._sample(begin, line)
            if record is not None and found and step_of(record) != step_of(found[0][1]):
                break
            found += [] if record is None else [(begin, record)]
            begin += len(line)
        return found, begin if begin < end and found else end

    def _last_step(self, begin: int, end: int) -> tuple[list[Placed], int]:
        """Read the samples of the last step of a part of the file, and find where the part before it ends."""
        found: list[Placed] = []
        for offset, line in backwards(self._file, end):
            record = self._sample(offset, line) if offset >= begin else None
            if offset < begin or (record is not None and found and step_of(record) != step_of(found[0][1])):
                break
            found += [] if record is None else [(offset, record)]
        return found[::-1], found[-1][0] if found else begin

    def _next_step(self, place: int, end: int) -> int:
        """Find a place where a step begins, behind a place in the middle of a line."""
        self._file.seek(place)
        return self._first_step(place + len(self._file.readline()), end)[1]

    def _sample(self, offset: int, line: bytes) -> dict[str, Any] | None:
        record = parsed(line) if line.endswith(b"\n") else None
        if record is not None and step_of(record) is not None:
            return record
        self.cut_short |= not line.endswith(b"\n")
        if line.strip() and line.endswith(b"\n"):
            self.broken.add(offset)
        return None


def _shown(record: dict[str, Any]) -> dict[str, Any]:
    tokens = record.get("response_tokens")
    errors = record.get("reward_errors")
    errors = {str(name): _text(text) for name, text in errors.items()} if isinstance(errors, dict) else {}
    if "environment_error" in record:
        errors["environment"] = _text(record["environment_error"])
    reward, images, turns = number_of(record.get("reward")), record.get("images"), record.get("turns")
    shown: dict[str, Any] = {
        "step": step_of(record),
        "id": _text(record.get("prompt_id", ""))[:200],
        "prompt": _text(record.get("prompt", "")),
        "response": _text(record.get("response", "")),
        "tokens": len(tokens) if isinstance(tokens, list) else None,
        "finished": record.get("finished") is not False,
        "reward": reward if reward is not None and math.isfinite(reward) else None,
    }
    if "validation" in record:
        shown["validation"] = _text(record["validation"])[:200]
    if errors:
        shown["errors"] = errors
    if isinstance(images, list):
        shown["images"] = [name for name in images if isinstance(name, str) and _PICTURE.fullmatch(name)]
    if isinstance(turns, list):
        shown["turns"] = len(turns)
    return shown


def _text(value: Any) -> str:
    return shortened(value if isinstance(value, str) else json.dumps(value), LONGEST)


def last_samples(run: Run, count: int) -> list[dict[str, Any]]:
    """Read the last samples of a run, as :func:`choose_samples` gives them, without reading the whole file."""
    path = run.path / SAMPLES
    if not path.is_file():
        return []
    found: list[dict[str, Any]] = []
    with path.open("rb") as file:
        for _, line in backwards(file):
            record = parsed(line) if line.endswith(b"\n") else None
            if record is not None and step_of(record) is not None:
                found.append(record)
                if len(found) == count:
                    break
    return [_shown(record) for record in reversed(found)]
