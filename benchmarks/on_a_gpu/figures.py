"""Figures of a step, from the files that it wrote and what it printed."""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


def last_json(output: str) -> Any:
    """The last JSON value that a program printed, from the beginning of a line to the end of one.

    Libraries may print before it, and after it as the program ends.

    Raises:
        ValueError: There is none.
    """
    decoder, lines = json.JSONDecoder(), output.splitlines()
    for start in reversed(range(len(lines))):
        if lines[start][:1] in ("{", "["):
            text = "\n".join(lines[start:])
            try:
                value, end = decoder.raw_decode(text)
            except ValueError:
                continue
            if not text[end:].partition("\n")[0].strip():
                return value
    raise ValueError("no JSON value was printed")


def printed(folder: Path, output: str) -> Any:  # noqa: ARG001 - as all readers
    """The last JSON value of the output."""
    return last_json(output)


def checks(folder: Path, output: str) -> dict[str, Any]:
    """What ``anytron verify --json`` prints, by check."""
    return {row["name"]: {key: row[key] for key in ("status", "difference", "tolerance", "detail")}
            for row in printed(folder, output)["results"]}  # fmt: skip


def rules(folder: Path, output: str) -> dict[str, Any]:
    """What ``anytron conformance --json`` counts, the seconds of each level, and every rule that is broken."""
    report = printed(folder, output)
    seconds: dict[str, float] = {}
    for rule in report["results"]:
        level = rule["name"].partition(".")[0]
        seconds[level] = round(seconds.get(level, 0.0) + rule["seconds"], 1)
    broken = [rule for rule in report["results"] if rule["status"] == "failed"]
    return {**report["counts"], "seconds": seconds, "failures": broken}


def tests(folder: Path, output: str) -> dict[str, Any]:  # noqa: ARG001
    """How many tests passed, failed and were skipped, and which failed, from JUnit's file."""
    cases = list(ET.parse(folder / "junit.xml").iter("testcase"))  # noqa: S314 - our own file
    by_outcome: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for case in cases:
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        by_outcome[outcome].append(f"{case.get('classname')}::{case.get('name')}")
    return {**{outcome: len(ids) for outcome, ids in by_outcome.items()}, "failures": by_outcome["failed"]}


def run(folder: Path, output: str) -> dict[str, float]:  # noqa: ARG001
    """What a training run learned and took, from its metrics: as far as it came."""
    text = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    rewards = [record["reward/mean"] for record in records]
    times = {
        name.replace("/", "_"): statistics.median(record[name] for record in records[len(records) // 10 :])
        for name in ("time/step_s", "time/rollout_s", "time/score_s", "time/update_s", "time/sync_s")
    }
    return {
        "steps": len(records),
        "reward_first_ten": statistics.fmean(rewards[:10]),
        "reward_last_ten": statistics.fmean(rewards[-10:]),
        "log_prob_abs_diff_max": max(record["rollout/log_prob_abs_diff"] for record in records),
        **times,
    }


def numbers(value: object, name: str) -> Iterator[tuple[str, float]]:
    """The single numbers of a step's figures, with the step's name before each; tables are left out."""
    if isinstance(value, dict):
        plain: Mapping[str, object] = value.get("figures", value)
        for key, found in plain.items():
            if isinstance(found, int | float) and not isinstance(found, bool):
                yield f"{name}.{key}", found
