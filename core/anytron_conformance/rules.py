"""The definition of a rule: what a platform must do, the cases in which this is checked, and the checking function.

Rules belong to levels; :func:`rules_of` imports the rules of a level.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from anytron.base.errors import ConfigError, did_you_mean
from anytron.base.results import Result
from anytron.proof.checks import Check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from anytron.base.results import Status
    from anytron.device.platform import Feature
    from anytron_conformance.subject import Subject


Level = Literal["device", "sequences", "kernels", "model", "training"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""The levels in order. Each relies on the earlier ones: its results mean little while an earlier level fails."""

PAGE = "docs/reference/conformance.md"
"""The page with a section for each rule, named like the rule. The source distribution has it, the wheel does not."""
TITLE = "The rules of conformance"
"""Title of that page, also in the menu of the documentation's site."""


@dataclass(frozen=True)
class Case:
    """One situation in which a rule is checked.

    Attributes:
        name: Name of the case, unique in its rule, for people: ``thd, lengths 1 2, aligned to 8``.
        values: Parameters of the case, in a form that the rule chooses.
        size: Size by which cases are ordered, so that the first failing case, which is shown, is the smallest.
        needs: Features that this case requires and a platform may lack.
    """

    name: str = ""
    values: Any = None
    size: int = 0
    needs: tuple[Feature, ...] = ()


class Broken(Exception):  # noqa: N818 - what happened, not an error of ours
    """The platform breaks the rule in the case at hand. A check raises it; the kit adds the case.

    Args:
        what: Description of the fault, a sentence for the platform's author: ``The logits differ from transformers'.``
        difference: The difference and its limit: ``largest difference 0.3 at [0, 2], allowed 1e-05``.
    """

    def __init__(self, what: str, difference: str = "") -> None:
        self.what = what
        self.difference = difference
        super().__init__(f"{what} {difference}".rstrip())


@dataclass(frozen=True)
class Rule(Check):
    """A rule: one thing that a platform must do, with the function that checks it.

    Attributes:
        name: The rule's level, a dot, and its :attr:`title`, lower-case words with hyphens.
        function: Function of the subject and a case. It returns if the platform keeps the rule, and raises
            :class:`Broken` if not, or :class:`~anytron.proof.checks.Inapplicable` if this machine cannot make the case,
            such as two ranks on one device; any other exception is a failure too. Its docstring describes how the
            rule is checked, and what usually breaks it.
        contract: What a platform must do, in one sentence.
        cases: The cases, or a function of the subject that makes them.
        needs: Features that the whole rule requires and a platform may lack.
        limit_s: Seconds after which the check counts as hanging, and its process is killed.
    """

    contract: str = ""
    cases: tuple[Case, ...] | Callable[[Subject], Iterable[Case]] = (Case(),)
    needs: tuple[Feature, ...] = ()
    limit_s: float = field(default=60.0, compare=False)

    @property
    def level(self) -> Level:
        """Level of the rule."""
        return cast("Level", self.name.partition(".")[0])

    @property
    def title(self) -> str:
        """Name of the rule without the level, unique in the kit; also its anchor in the documentation."""
        return self.name.partition(".")[2]

    def result(self, status: Status, detail: str = "", **found: Any) -> Result:
        """Make a result that contains :attr:`contract` and the place of the rule's documentation."""
        page = f"the page '{TITLE}', section {self.title} ({PAGE}#{self.title} in the source distribution of anytron)"
        notes = {**found.pop("notes", {}), "contract": self.contract, "docs": page}
        return Result(self.name, status, detail, notes=notes, **found)

    def failed(self, what: str, difference: str = "", **found: Any) -> Result:
        """Return the result of a rule that is broken, or could not be checked."""
        told = " ".join(self.help.replace("``", "`").split())
        notes = {"difference": difference, **found.pop("notes", {}), "checked": told}
        return self.result("failed", what, notes=notes, **found)

    def cases_for(self, subject: Subject) -> list[Case]:
        """The cases, from small to large."""
        found = self.cases(subject) if callable(self.cases) else self.cases
        return sorted(found, key=lambda case: case.size)


def rule(
    name: str,
    level: Level,
    contract: str,
    *,
    cases: Iterable[Case] | Callable[[Subject], Iterable[Case]] = (Case(),),
    needs: Iterable[Feature] = (),
    limit_s: float = 60.0,
) -> Callable[[Callable[[Subject, Case], None]], Rule]:
    """Make a rule from the function that checks it; the function's docstring becomes part of the documentation.

    The arguments are those of :class:`Rule`, but ``name`` is the rule's title. A level's package lists its rules in
    ``RULES``, in the order in which they are made.
    """

    def make(check: Callable[[Subject, Case], None]) -> Rule:
        return Rule(
            f"{level}.{name}",
            check,
            contract=contract,
            cases=cases if callable(cases) else tuple(cases),
            needs=tuple(needs),
            limit_s=limit_s,
        )

    return make


def rules_of(level: Level) -> tuple[Rule, ...]:
    """Import a level and return its rules, in order. Imports torch."""
    rules: tuple[Rule, ...] = importlib.import_module(f"anytron_conformance.{level}").RULES
    return rules


def find_rule(level: Level, name: str) -> Rule:
    """Return one rule of a level."""
    return next(rule for rule in rules_of(level) if rule.title == name)


def checked_levels(asked: Sequence[str]) -> tuple[Level, ...]:
    """Return the given levels in the kit's order; all levels if none is given.

    Raises:
        ConfigError: A level does not exist.
    """
    for name in asked:
        if name not in LEVELS:
            raise ConfigError(
                f"Level '{name}' does not exist.",
                where="--level",
                why=f"the levels are {', '.join(LEVELS)}",
                fix=did_you_mean(name, LEVELS) or "name one of these levels, or remove --level to check all",
            )
    return tuple(level for level in LEVELS if level in asked or not asked)
