"""What a user reads is plain English: phrases that are read twice are refused in the texts of the sources.

A text is any string but a docstring. The entries of docstrings have a rule of their own.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest

from tests.docs.error_page import texts
from tests.docs.remedies import said_in
from tests.house import PACKAGES, ROOT, modules

if TYPE_CHECKING:
    from collections.abc import Iterator

TWICE = re.compile(
    r"\b(?:what (?:of|about)|(?:is|are|be|was|were) told|(?:come|comes|came) for|(?:that|those) of"
    r"|of (?:its|their|one's) own|nobody|somebody|whoever|(?:is|are) (?-i:none)|belongs? into|(?:do|does) not fit"
    r"|(?:goes|go) together|otherwise than|(?:takes|makes|gives) (?-i:none)|leave (?:it|them) out|comes? too late"
    r"|so many|(?:can|may|must) (?:have|contain) no|(?:has|have|had|gives?|sets?) (?:\w+ ){0,5}?another"
    r" (?:answer|dtype|id|name|shape|state|type|value))\b"
    r"|(?<!\bthere )\b(?:is|are) no (?!longer\b|more\b)|^(?:It|They|That|What)\.$|\bsomething unusable\b",
    re.IGNORECASE,
)
POINTS = re.compile(
    r"^\s+\w+(?:, \w+)*: (?:Its|Their|Those|These|That|As given|Likewise)\b[^\s.]*(?: \w+)?\.$", re.MULTILINE
)
"""Entries of a docstring, such as ``rank: Its rank.``, that say nothing without the entry before."""


def phrases(source: str) -> Iterator[tuple[int, str]]:
    """The refused phrases of a file, each with the line where its text begins."""
    for node in said_in(ast.parse(source)):
        for text in texts(node):
            if " " in text or text.endswith("."):
                yield from ((node.lineno, found[0]) for found in TWICE.finditer(text))


def test_texts_are_read_once():
    found, read = [], 0
    for package in PACKAGES:
        for path in modules(package).values():
            name = str(path.relative_to(ROOT))
            read += 1
            source = path.read_text(encoding="utf-8")
            found += [f"{name}:{line}: {phrase!r}" for line, phrase in phrases(source)]
    assert found == []
    assert read > 400


def test_entries_of_docstrings_name_what_they_describe():
    found = []
    for package in PACKAGES:
        for path in modules(package).values():
            source = path.read_text(encoding="utf-8")
            found += [f"{path.relative_to(ROOT)}: {entry[0].strip()}" for entry in POINTS.finditer(source)]
    assert found == []


@pytest.mark.parametrize("entry", ["rank: Its rank.", "settings, log: As given.", "key: Likewise.", "ranks: Those."])
def test_an_entry_that_only_points_is_noticed(entry):
    assert POINTS.search(f'    """Start.\n\n    Args:\n        {entry}\n    """')
    assert not POINTS.search("        rank: Rank of the worker.\n        steps: Its steps, in order.\n")


def test_descriptions_of_keys_are_read_once():
    page = (ROOT / "docs/reference/config.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) > 400
    assert [line for line in page.splitlines() if TWICE.search(line)] == []


@pytest.mark.parametrize(
    ("source", "phrase"),
    [
        ("EngineError('The way of weights: nobody comes.')", "nobody"),
        ("DataError('The prompt is none of reasoning-gym.')", "is none"),
        ("f(why=f'{name} is no list')", "is no "),
        ("f(fix='a program belongs '\n  'into a process')", "belongs into"),
        ("f(f'values of {a} ' + 'and those of the layout')", "those of"),
        ("f('the rank is told its device')", "is told"),
        ("description = 'They.'", "They."),
        ("f('it has an environment of its own')", "of its own"),
        ("f('values do not fit the layout')", "do not fit"),
        ("f('a run has no work for so many replicas')", "so many"),
        ("f('a message of the role system can have no images')", "can have no"),
        ("f('give each set another name')", "give each set another name"),
        ("f('two tensors have another shape')", "have another shape"),
        ("f(fix='leave it out, or train all weights')", "leave it out"),
        ("f('A reward function returned something unusable.')", "something unusable"),
    ],
)
def test_a_phrase_that_is_read_twice_is_noticed(source, phrase):
    assert [found for _, found in phrases(source)] == [phrase]


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    'What of it? Nobody is told.'",
        "f('there is no file', 'it is no longer there')",
        "f('it is None', 'that offers it')",
        "NAMES = ('nobody',)",
    ],
)
def test_other_texts_are_let_through(source):
    assert list(phrases(source)) == []
