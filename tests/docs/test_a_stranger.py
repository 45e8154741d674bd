"""Whoever brings up a chip and has nobody to ask: how many pages that takes, and what they must say.

Somebody once tried it from the pages alone and wrote down each question that they left open.
"""

from __future__ import annotations

import re
from collections import deque
from typing import TYPE_CHECKING

import pytest

from anytron.proof.verification.checks import CHECKS
from anytron_conformance.rules import LEVELS, rules_of
from tests.docs.test_commands import BLOCKS
from tests.house import ROOT

if TYPE_CHECKING:
    from pathlib import Path

FIRST, TUTORIAL = ROOT / "docs/index.md", ROOT / "docs/tutorial/bring-up-a-chip.md"
PLATFORM, EXTENSION = "docs/how-to/write-a-platform.md", "docs/how-to/write-an-extension.md"
NAMES, MASKS, KERNELS = "docs/reference/api.md", "docs/explanation/masks.md", "docs/how-to/check-your-kernels.md"
WORD_FOR_WORD = "tests/plugins/test_wheels.py::test_the_tutorial_word_for_word"


def links(text: str, page: Path) -> list[Path]:
    """The pages to which a text of a page leads, in order."""
    return [(page.parent / target).resolve() for target in re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", text)]


def way(start: Path, end: Path) -> list[Path]:
    """The fewest pages from one to another by links, both included."""
    ways = deque([[start]])
    seen = {start}
    while ways:
        here = ways.popleft()
        if here[-1] == end:
            return here
        for page in links(here[-1].read_text(encoding="utf-8"), here[-1]):
            if page not in seen and page.is_file():
                seen.add(page)
                ways.append([*here, page])
    raise AssertionError(f"no link leads to {end}")


def test_from_the_first_page_to_a_running_platform_it_is_at_most_five():
    """Counted are the pages on the way, and those that the last one sends to before its first command."""
    text = TUTORIAL.read_text(encoding="utf-8")
    before = links(text.partition("```")[0], TUTORIAL)
    assert len({*way(FIRST, TUTORIAL), *before}) <= 5


def test_the_last_of_them_ends_in_training_on_it_and_a_test_runs_all_that_it_says():
    mine = [block for block in BLOCKS if block.place.startswith(str(TUTORIAL.relative_to(ROOT)))]
    assert {block.value for block in mine} == {WORD_FOR_WORD}
    commands = [line for block in mine for line in block.lines]
    assert commands[0] == "anytron new-platform acme"
    assert commands[-1].startswith("anytron train ")
    assert "platform.name=acme" in commands[-1]


def test_a_page_that_is_farther_away_is_counted(tmp_path):
    for number in range(6):
        (tmp_path / f"{number}.md").write_text(f"[on]({number + 1}.md#part) [back](0.md)")
    assert len(way(tmp_path / "0.md", tmp_path / "5.md")) == 6
    with pytest.raises(AssertionError, match="no link"):
        way(tmp_path / "5.md", tmp_path / "6.md")


# ---- questions that were open once --------------------------------------------------------------------

ANSWERS = {
    "where is a complete one": (PLATFORM, "", ["examples/third_party_platform", "anytron new-platform acme"]),
    "how is an extension offered": (EXTENSION, "Offer it", ["anytron.plugins", "**module**", "**class**"]),
    "how is a plugin switched off": (EXTENSION, "Switch it off", ["ANYTRON_PLUGINS", "ANYTRON_DISABLE_PLUGINS"]),
    "what is a layout constraint": (NAMES, "LayoutConstraints", ["from anytron.sequences import", "`align`"]),
    "what has a runtime": (NAMES, "DeviceRuntime", ["`device_type`", "`communication_backend`"]),
    "fewer queries than keys": (NAMES, "AttentionKernel", ["last query stands at its last\n  key", "top left"]),
    "lengths without padding": (NAMES, "AttentionCall", ["None = there is no padding between sequences"]),
    "mask and mode at once": (NAMES, "AttentionCall", ["hidden if the mask or causality hides it"]),
    "where the window is": (NAMES, "AttentionSpec", ["`traits`", "indow"]),
    "options of fused kernels": (NAMES, "KernelSpec", ["`zero_centered` (bool); other kernels have no options"]),
    "shapes of fused kernels": (PLATFORM, "4. ", ["heads of queries and keys `[S, B, heads, D]`", "`[S, B, 2 N]`"]),
    "entropy of ignored labels": (NAMES, "LogProbKernel", ["log-prob and entropy 0, no gradient of either"]),
    "padding of the vocabulary": (NAMES, "LogProbKernel", ["which are on the last ranks, are padding"]),
    "which masks are accepted": (MASKS, "", ["| `bshd` | `none`, `full-4d` | `none` |", "families.md#"]),
    "hooks without entry points": (PLATFORM, "7. ", ["hooks_of(platform)"]),
    "two scopes": (PLATFORM, "4. ", ["scopes.combine("]),
    "what to raise and where to log": (PLATFORM, "5. ", ["logging.getLogger(__name__)", "logs/", "EngineError("]),
    "a patch": ("docs/explanation/patches.md", "An example", ["Patch("]),
    "a recipe for CI": (KERNELS, "What a vendor's CI runs", ["anytron plugins list", "anytron verify run.yaml"]),
}


@pytest.mark.parametrize("question", ANSWERS)
def test_a_question_has_its_answer(question):
    page, heading, said = ANSWERS[question]
    text = (ROOT / page).read_text(encoding="utf-8")
    if heading:
        (text,) = [part for part in re.split(r"^#{2,3} ", text, flags=re.MULTILINE)[1:] if part.startswith(heading)]
    assert [words for words in said if words not in text] == []


def test_what_kernels_must_satisfy_is_what_the_kit_checks():
    rows = [line for line in (ROOT / KERNELS).read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    named = {name for row in rows for name in re.findall(r"`([a-z0-9-]+)`", row.strip("|").split("|")[-1])}
    assert (
        named - {rule.title for level in LEVELS for rule in rules_of(level)} - {check.name for check in CHECKS} == set()
    )
    assert {rule.title for rule in rules_of("kernels")} - named == set()
