"""What all checks have in common: how a check is defined and run, and the report of several checks."""

from __future__ import annotations

import inspect
import platform as machine
import time
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, TypeVar

from anytron.base.results import STATUSES, Result, of_error
from anytron.base.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


class Inapplicable(Exception):  # noqa: N818 - no error at all
    """Raised if a check, or a case of a check, does not apply here: its result is ``skipped``.

    Args:
        reason: The reason, without a full stop.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True)
class Check:
    """One check of a command such as ``anytron verify``, which makes its checks in order.

    Attributes:
        name: Name of the check, unique among the checks of the command.
        function: Function that makes the check and returns its result, or several; its docstring describes the check.
    """

    name: str
    function: Callable[..., Any]

    @property
    def help(self) -> str:
        """Description of the check."""
        return inspect.getdoc(self.function) or ""

    def results(self, *subject: Any) -> Iterator[Result]:
        """Make the check and yield its results; an exception becomes a result.

        Args:
            subject: Arguments of the check's function.
        """
        try:
            found = self.function(*subject)
            yield from [found] if isinstance(found, Result) else found
        except Inapplicable as error:
            yield Result(self.name, "skipped", error.reason)
        except Exception as error:  # noqa: BLE001 - a check that crashes is a finding, and the others are made
            yield of_error(self.name, error)


Checked = TypeVar("Checked", bound=Check)


class Watcher:
    """Receives the progress of checks; this base class ignores it."""

    def begins(self, what: str) -> None:
        """Receive the name of the check, or of the preparation, that begins now."""

    def made(self, result: Result) -> None:
        """Receive the result of a check that has ended."""


def make(
    checks: Iterable[Checked], results_of: Callable[[Checked], Iterable[Result]], watcher: Watcher
) -> Iterator[Result]:
    """Make checks one after the other, and yield their results with the seconds that they took.

    Args:
        checks: Checks, in order.
        results_of: Function that makes one check and yields its results.
        watcher: Receives the progress.
    """
    for check in checks:
        watcher.begins(check.name)
        began = time.monotonic()
        for result in results_of(check):
            timed = replace(result, seconds=time.monotonic() - began)
            watcher.made(timed)
            yield timed


@dataclass(frozen=True)
class Report:
    """The results of all checks of a command.

    Attributes:
        results: Results, in order.
        facts: Facts about what was checked, by name, as JSON values.
        interrupted: Whether Ctrl-C was pressed before all checks were made.
    """

    results: Sequence[Result]
    facts: Mapping[str, Any] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(result.status != "failed" for result in self.results)

    @property
    def counts(self) -> dict[str, int]:
        """Number of results by status; if checks have cases, also the numbers of cases that were run and skipped."""
        found: dict[str, int] = {status: sum(one.status == status for one in self.results) for status in STATUSES}
        made = sum(one.cases for one in self.results)
        skipped = sum(one.skipped for one in self.results)
        return {**found, "cases": made, "cases_skipped": skipped} if made else found

    def as_json(self) -> dict[str, Any]:
        """Return the report as one JSON object."""
        return {
            **self.facts,
            "versions": versions(),
            "results": [one.as_json() for one in self.results],
            "counts": self.counts,
            "interrupted": self.interrupted,
        }


def versions() -> dict[str, str]:
    """The versions of the packages that a report depends on."""
    found = {"anytron": __version__, "python": machine.python_version()}
    for package in ("torch", "megatron-core", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # noqa: PERF203 - a platform may be tested without an engine
            continue
    return found
