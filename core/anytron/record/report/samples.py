"""Choose samples for a report: from the first steps, the last steps and some in between, as many as fit."""

from __future__ import annotations

import json
import math
import os
import re
from typing import TYPE_CHECKING, Any

from anytron.record.report.history import number_of, parsed, step_of
from anytron.record.report.run import SAMPLES
from anytron.record.report.settings import shortened

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anytron.record.report.run import Run

ENDS = 5
"""Steps at each end of a run that come before all others."""
LONGEST = 12_000
"""Characters of a prompt or response that are shown."""
NEAR_THE_END = 1 << 20
"""Bytes of the file that are read for the last samples."""
_PICTURE = re.compile(r"images/\d+-([A-Za-z0-9_.-]+-)?\d+\.png")


def choose_samples(run: Run, room: int) -> dict[str, Any]:
    """Read samples of a run, chosen by the importance of their steps, as many as fit.

    Args:
        run: The run.
        room: Largest size in bytes of JSON; at least one sample is returned.

    Returns:
        ``samples``: dictionaries with step, id, prompt, response, tokens, finished and reward, and, if there are any,
        errors, images and turns, in the order of the file; ``logged``: number of samples in the file.
    """
    places: dict[int, list[int]] = {}
    for step, record in run.samples():
        places.setdefault(step, []).append(record.offset)
    chosen: list[tuple[int, dict[str, Any]]] = []
    if places:
        with (run.path / SAMPLES).open("rb") as file:
            for offset in (offset for step in by_importance(sorted(places)) for offset in places[step]):
                file.seek(offset)
                found = parsed(file.readline())
                if found is None or step_of(found) is None:  # the run was resumed since, and its files were cut back
                    break
                sample = _shown(found)
                room -= len(json.dumps(sample))
                if room < 0 and chosen:
                    break
                chosen.append((offset, sample))
    return {
        "samples": [sample for _, sample in sorted(chosen, key=lambda one: one[0])],
        "logged": sum(map(len, places.values())),
    }


def by_importance(steps: Sequence[int]) -> Iterator[int]:
    """Order steps by importance: first and last ones alternately, then the others, evenly spread at every point."""
    count = len(steps)
    ends = [place for number in range(min(ENDS, count)) for place in (number, count - 1 - number)]
    ends = list(dict.fromkeys(ends))
    yield from (steps[place] for place in ends)
    middle = steps[ENDS : count - ENDS] if count > 2 * ENDS else []
    bits = max(len(middle) - 1, 0).bit_length()
    for number in range(1 << bits if middle else 0):
        place = int(f"{number:0{bits}b}"[::-1], 2) if bits else 0  # van der Corput's sequence
        if place < len(middle):
            yield middle[place]


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
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - NEAR_THE_END, 0))
        lines = file.read(NEAR_THE_END).split(b"\n")
    whole = lines[:-1] if end <= NEAR_THE_END else lines[1:-1]
    records = [record for line in whole if (record := parsed(line)) is not None and step_of(record) is not None]
    return [_shown(record) for record in records[-count:]]
