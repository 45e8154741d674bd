"""What a rule is: one sentence of the contract, the cases in which it is checked, and the function that checks it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from anytron.device.limits import Feature
    from anytron.proof.conformance.subject import Subject

Level = Literal["device", "sequences", "kernels", "model", "training"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""From what everything else stands on to what it is for; a later level means little while an earlier one fails."""

PAGE = "docs/reference/conformance.md"
"""Has a section for each rule, named as the rule; the wheel does not have it, and the source distribution does."""
TITLE = "The rules of conformance"
"""Of that page, as the menu of the documentation's site shows it too."""


@dataclass(frozen=True)
class Case:
    """One situation in which a rule is checked.

    Attributes:
        name: Tells it from the rule's other cases, in words for people: ``thd, lengths 1 2, aligned to 8``.
        values: What the check needs to know of it; the rule's own business.
        size: Cases are made in order of it, so that the one that is shown is the smallest that fails.
        needs: What a platform may declare not to do and this case asks for.
    """

    name: str = ""
    values: Any = None
    size: int = 0
    needs: tuple[Feature, ...] = ()


class Broken(Exception):  # noqa: N818 - what happened, not an error of ours
    """The platform breaks the rule in the case at hand. A check raises it; the kit adds the case.

    Args:
        what: What was found, a sentence for the platform's author: ``Restoring the state drew other numbers.``
        difference: How far off it is, and what is allowed: ``largest difference 0.3 at [0, 2], allowed 1e-05``.
    """

    def __init__(self, what: str, difference: str = "") -> None:
        self.what = what
        self.difference = difference
        super().__init__(f"{what} {difference}".rstrip())


class Inapplicable(Exception):  # noqa: N818 - no error at all
    """The case cannot be made on this machine, such as two ranks on one device. It is counted as skipped.

    Args:
        reason: Why, without full stop.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True)
class Rule:
    """A rule of the contract between platforms and everything else.

    Attributes:
        name: Lower-case words with hyphens, unique in the kit; also the anchor in the documentation.
        level: Where it belongs.
        contract: What a platform must do, in one sentence.
        help: What is done to find out, and what usually breaks it; the docstring of the check.
        check: Returns if the platform keeps the rule in a case, and raises :class:`Broken` if not. Whatever else it
            raises is a failure as well.
        cases: The cases, or a function of the subject that makes them.
        needs: What a platform may declare not to do and the whole rule asks for.
        limit_s: Seconds after which the check is taken for hanging, and its process is killed.
    """

    name: str
    level: Level
    contract: str
    help: str
    check: Callable[[Subject, Case], None]
    cases: tuple[Case, ...] | Callable[[Subject], Iterable[Case]] = (Case(),)
    needs: tuple[Feature, ...] = ()
    limit_s: float = field(default=60.0, compare=False)

    @property
    def docs(self) -> str:
        """Where the documentation explains it: findable on its site and in the source distribution alike."""
        return f"the page '{TITLE}', section {self.name} ({PAGE}#{self.name} in the source distribution of anytron)"

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
    """Make a rule of the function that checks it; its docstring goes into the documentation.

    A level's package lists its rules in ``RULES``, in the order in which they are made.
    """

    def make(check: Callable[[Subject, Case], None]) -> Rule:
        return Rule(
            name=name,
            level=level,
            contract=contract,
            help=inspect.getdoc(check) or "",
            check=check,
            cases=cases if callable(cases) else tuple(cases),
            needs=tuple(needs),
            limit_s=limit_s,
        )

    return make
