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

_skipped: pytest.StashKey[dict[str, list[str]]] = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_skipped] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """Note each test that skipped, under the marker that allows it."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        marker = next((name for name in SKIPPED if item.get_closest_marker(name)), "no marker")
        item.config.stash[_skipped].setdefault(marker, []).append(item.nodeid)
    return report


def _complaints(config: pytest.Config) -> list[str]:
    skipped = config.stash[_skipped]
    complaints = [f"{nodeid} skipped, and no marker says what it needs" for nodeid in skipped.get("no marker", [])]
    whole = config.args == config.getini("testpaths") and not config.option.keyword
    if whole and config.option.markexpr == "not slow":
        counts = {name: len(skipped.get(name, [])) for name in SKIPPED}
        complaints += [
            f"{counts[name]} tests marked '{name}' skipped; tests/conftest.py expects {expected}"
            for name, expected in SKIPPED.items()
            if counts[name] > expected
        ]
    return complaints


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for complaint in _complaints(terminalreporter.config):
        terminalreporter.write_line(f"ERROR {complaint}", red=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if a test skipped that should have run, or more skipped than are known to."""
    if _complaints(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
