"""What every test stands on: one processor thread, and a check of what was skipped."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# Set before anything imports torch: tests run several processes on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A deadline per example would time the machine; on CI the same examples are tried at every run.
settings.register_profile("anytron", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("anytron")

SKIPPED = {"gpu": 2, "npu": 0, "compiler": 0, "mcore": 0}
"""How many tests of the whole suite skip on a machine without accelerator, by the marker that says what they need."""


class Skips:
    """The tests that skipped, under the marker that allows it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._found: dict[str, list[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            marker = next((name for name in SKIPPED if name in report.keywords), "no marker")
            self._found.setdefault(marker, []).append(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for complaint in self._complaints():
            terminalreporter.write_line(f"ERROR {complaint}", red=True)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the run if a test skipped that should have run, or more skipped than are known to."""
        if self._complaints():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _complaints(self) -> list[str]:
        complaints = [f"{name} skipped, and no marker says what it needs" for name in self._found.get("no marker", [])]
        config = self._config
        whole = config.args == config.getini("testpaths") and not config.option.keyword
        if whole and config.option.markexpr == "not slow":
            counts = {name: len(self._found.get(name, [])) for name in SKIPPED}
            complaints += [
                f"{counts[name]} tests marked '{name}' skipped; tests/conftest.py expects {expected}"
                for name, expected in SKIPPED.items()
                if counts[name] > expected
            ]
        return complaints


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Skips(config), "skips")
