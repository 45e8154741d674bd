"""The published faults: every entry names its thread and its fault in a few words, and no fault stands there twice."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

Entry = dict[str, Any]

FOLDER = Path(__file__).parent / "published"
LEAST_IN_ALL = 100
LEAST = {"device": 60, "rollout": 15, "loss": 15}
KINDS = {
    "device": {
        "bridge",
        "collective",
        "export",
        "kernel",
        "layout",
        "mask",
        "optimizer",
        "position",
        "precision",
        "recompute",
        "routing",
    },
    "rollout": {"cache", "log-prob", "order", "sampler", "sync", "template"},
    "loss": {"advantage", "data", "loss", "resume", "reward", "schedule"},
}
FIELDS = ["name", "kind", "link", "date", "what", "shows", "lived", "mutant", "checked"]
CHECKED = {"thread", "commit", "title and diff"}
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
LINK = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/((issues|pull)/[1-9]\d*|commit/[0-9a-f]{40})")
DATE = re.compile(r"\d{4}-(0[1-9]|1[0-2])")
LONGEST = 220


def published() -> dict[str, list[Entry]]:
    """The entries of each district, as the files hold them."""
    return {district: json.loads((FOLDER / f"{district}.json").read_text("utf-8")) for district in LEAST}


def flaws(corpus: dict[str, list[Entry]]) -> list[str]:
    """What is wrong with a corpus, one sentence for each flaw; empty for a sound one."""
    found = []
    for district, entries in corpus.items():
        if len(entries) < LEAST[district]:
            found.append(f"{district} holds {len(entries)} faults, {LEAST[district]} are needed")
        if entries != sorted(entries, key=lambda entry: (str(entry.get("kind")), str(entry.get("link")))):
            found.append(f"{district} is not sorted by kind and link")
        for entry in entries:
            found.extend(f"{district}, {entry.get('name')}: {flaw}" for flaw in flaws_of(entry, KINDS[district]))
    together = [entry for entries in corpus.values() for entry in entries]
    if len(together) < LEAST_IN_ALL:
        found.append(f"the corpus holds {len(together)} faults, {LEAST_IN_ALL} are needed")
    for field in ("name", "link"):
        values = [str(entry.get(field)) for entry in together]
        found.extend(f"{field} {value} stands there twice" for value in set(values) if values.count(value) > 1)
    return found


def flaws_of(entry: Entry, kinds: set[str]) -> list[str]:
    """What is wrong with one entry, whose kind must be in ``kinds``."""
    if list(entry) != FIELDS:
        return [f"its fields are {list(entry)}"]
    found = [
        f"{field} is {entry[field]!r}"
        for field, pattern in (("name", NAME), ("link", LINK))
        if not pattern.fullmatch(entry[field])
    ]
    found += [
        f"{field} is {entry[field]!r}"
        for field, known in (("kind", kinds), ("checked", CHECKED))
        if entry[field] not in known
    ]
    date = entry["date"]
    if date is not None and not (DATE.fullmatch(date) and "2024-01" <= date <= "2026-11"):
        found.append(f"date is {date!r}")
    texts = {
        field: entry[field]
        for field in ("what", "shows", "lived", "mutant")
        if (field, entry[field]) != ("lived", None)
    }
    for field, text in texts.items():
        if not text.endswith(".") or text != text.strip() or len(text) > LONGEST:
            found.append(f"{field} is no text of at most {LONGEST} characters that ends with a full stop")
    return found


def test_published_faults_are_sound() -> None:
    assert flaws(published()) == []


def test_copied_entry_is_a_flaw() -> None:
    corpus = published()
    corpus["device"].insert(1, copy.deepcopy(corpus["device"][0]))
    first = corpus["device"][0]
    assert sorted(flaws(corpus)) == sorted(f"{field} {first[field]} stands there twice" for field in ("name", "link"))


def test_district_without_half_of_its_entries_is_a_flaw() -> None:
    corpus = published()
    corpus["loss"] = corpus["loss"][:10]
    assert "loss holds 10 faults, 15 are needed" in flaws(corpus)


def test_order_by_kind_and_link_is_held() -> None:
    corpus = published()
    corpus["rollout"].reverse()
    assert flaws(corpus) == ["rollout is not sorted by kind and link"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "Two words"),
        ("kind", "advantage"),
        ("link", "https://github.com/NVIDIA/Megatron-LM"),
        ("link", "https://example.org/NVIDIA/Megatron-LM/pull/1"),
        ("date", "2023-12"),
        ("date", "2026-12"),
        ("date", "2026-1"),
        ("what", "No full stop"),
        ("shows", ""),
        ("lived", "since 2026"),
        ("mutant", "x" * LONGEST + "."),
        ("checked", "not at all"),
    ],
)
def test_spoilt_field_is_a_flaw(field: str, value: str) -> None:
    entry = published()["device"][0]
    assert flaws_of(entry, KINDS["device"]) == []
    assert flaws_of({**entry, field: value}, KINDS["device"]) != []


def test_missing_field_is_a_flaw() -> None:
    entry = published()["device"][0]
    del entry["checked"]
    assert flaws_of(entry, KINDS["device"]) != []
