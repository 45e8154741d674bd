"""What the headers of examples say of a run's results, and whether a run has them.

A header says it in one line, ``# Expected: reward 0.98 after 500 steps, about 66 s on 2 idle cores.`` A reward is the
mean of the ten steps that end there, in the last of a file's stages; a held-out loss is that of the first one, and a
held-out accuracy the pass@1 of a validation set. The time has the start of the run in it, and no test asks for it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from tests.house import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

EXAMPLES = ROOT / "examples"
SLACK = 0.03
"""By how much a run may miss its header: other numbers of threads add in another order, and lead another way."""

_FIGURE = r"(reward|held-out loss|held-out accuracy) (\d\.\d\d) after (\d+) steps"
_LINE = re.compile(rf"# Expected: ({_FIGURE}(?:, {_FIGURE})*)(?:, about \d+ (?:s|min) on 2 idle cores)?\.")


class Figure(NamedTuple):
    """One number of a header.

    Attributes:
        what: ``reward``, ``held-out loss`` or ``held-out accuracy``.
        value: The number; a loss is in nats per token.
        step: After which step.
    """

    what: str
    value: float
    step: int


def expected(name: str) -> list[Figure]:
    """Read the header of an example; nothing if it expects nothing.

    Raises:
        AssertionError: It has more than one such line, or one of another form.
    """
    text = (EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if "expected:" in line.lower()]
    found = [_LINE.fullmatch(line) for line in lines]
    assert len(lines) <= 1, lines
    assert all(found), lines
    return [Figure(what, float(value), int(step)) for one in found for what, value, step in re.findall(_FIGURE, one[1])]


def assert_rewarded(name: str, metrics: Sequence[Mapping[str, float]], slack: float = SLACK) -> None:
    """Compare the rewards of a run, a mapping for each of its steps, with those of the example's header."""
    figures = [figure for figure in expected(name) if figure.what == "reward"]
    assert figures, f"the header of {name} says nothing"
    for figure in figures:
        rewards = [line["reward/mean"] for line in metrics if figure.step - 10 < line["step"] <= figure.step]
        assert len(rewards) == 10, f"{name} ended before step {figure.step}"
        assert sum(rewards) / 10 >= figure.value - slack, figure
