"""A check of skipped tests: each has a marker that names what it needs, and there are no more than expected."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping


class Skips:
    """Fails a run in which a test was skipped that should have run.

    With pytest-xdist, the process that distributes the tests gets the reports of all of them.

    Args:
        expected: How many tests of the whole suite are skipped, by the marker that says what they need. A skipped
            test without one of these markers fails the run.
        counted: Whether more skipped tests than ``expected`` fail the run, too.
        where: The file that holds ``expected``, for the message.
    """

    def __init__(self, expected: Mapping[str, int], *, counted: bool, where: str) -> None:
        self._expected = expected
        self._counted = counted
        self._where = where
        self._found: dict[str, list[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            marker = next((name for name in self._expected if name in report.keywords), "no marker")
            self._found.setdefault(marker, []).append(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for complaint in self._complaints():
            terminalreporter.write_line(f"ERROR {complaint}", red=True)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._complaints():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _complaints(self) -> list[str]:
        complaints = [f"{name} skipped, and no marker says what it needs" for name in self._found.get("no marker", [])]
        if self._counted:
            complaints += [
                f"{len(self._found[name])} tests marked '{name}' skipped; {self._where} expects {expected}"
                for name, expected in self._expected.items()
                if len(self._found.get(name, [])) > expected
            ]
        return complaints
