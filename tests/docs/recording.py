"""A plugin of pytest: write the outcome of every test into a file, for the support matrix.

``python -m pytest -p tests.docs.recording --record FILE ...`` (:mod:`tests.docs.measure` does that).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

OPTION = "--record"
_RECORDER = pytest.StashKey["Recorder"]()


class Recorder:
    """Collects outcomes.

    Attributes:
        outcomes: ``passed``, ``failed`` or ``skipped``, by the test's id.
    """

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what became of one phase of a test: its setup, itself, its end."""
        if report.when == "call" or report.outcome != "passed":
            known = self.outcomes.get(report.nodeid)
            self.outcomes[report.nodeid] = "failed" if known == "failed" else report.outcome


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, metavar="FILE", type=Path, help="write the outcome of every test into FILE")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_RECORDER] = Recorder()
    config.pluginmanager.register(config.stash[_RECORDER])


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption(OPTION)
    if path is not None:
        path.write_text(json.dumps(session.config.stash[_RECORDER].outcomes), encoding="utf-8")
