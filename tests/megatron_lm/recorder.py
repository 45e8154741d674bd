"""A pytest plugin that records the outcome of each of Megatron-LM's tests, and ends a test that takes too long."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import signal
import traceback
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

FRAMES = 6


class HungTestError(BaseException):
    """A test took longer than it may."""


class Recorder:
    """Write JSON lines: the tests found, the start and the end of each, each outcome but a passed set-up, pytest's end.

    Args:
        results: File that the lines are appended to.
        done: Names of tests that have run and are left out.
        seconds: How long a test may take. If Python cannot interrupt it (a collective that waits in C++), the process
            ends ten seconds later.
        tests: How many tests are run; None: all.
        log: Descriptor of a file for the stacks of such a test.
    """

    def __init__(self, results: Path, done: Collection[str], seconds: float, tests: int | None, log: int) -> None:
        self._results = results
        self._done = done
        self._seconds = seconds
        self._tests = tests
        self._left = 0
        self._log = log

    def _write(self, **entry: Any) -> None:
        with self._results.open("a", encoding="utf-8") as stream:
            stream.write("\n" + json.dumps(entry) + "\n")  # the line before may be cut off

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._write(collected=[item.nodeid for item in items])
        missing = [item for item in items if item.nodeid not in self._done]
        items[:] = missing[: self._tests]
        self._left = len(missing) - len(items)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(start=nodeid)
        faulthandler.dump_traceback_later(self._seconds + 10, exit=True, file=self._log)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._write(end=nodeid)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        with _alarm(self._seconds):
            yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report = (yield).get_result()  # type: ignore[misc]
        if report.when != "call" and report.outcome == "passed":
            return
        entry = {"id": item.nodeid, "when": report.when, "outcome": report.outcome}
        if hasattr(report, "wasxfail"):
            entry["outcome"] = "xfailed"
        elif report.outcome == "skipped":
            entry["reason"] = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        elif call.excinfo is not None:
            frames = traceback.extract_tb(call.excinfo.tb)[-FRAMES:]
            entry["type"] = call.excinfo.typename
            entry["message"] = str(call.excinfo.value)[:1500]
            entry["frames"] = [f"{frame.filename}:{frame.lineno} {frame.line}" for frame in frames]
        self._write(**entry)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome in ("failed", "skipped"):
            message = str(report.longrepr)[-1500:]
            self._write(id=report.nodeid, when="collect", outcome=report.outcome, type="collect", message=message)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._write(finished=int(exitstatus), left=self._left)


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise HungTestError(f"longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
