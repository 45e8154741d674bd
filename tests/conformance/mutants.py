"""Break platforms in every way that is written down here, and count those that the conformance kit catches.

A mutant is caught if the rule that it breaks fails with the right words (test_mutants.py, test_engine_levels.py). Takes
some minutes, most of them for the levels ``model`` and ``training``::

    python tests/conformance/mutants.py [--json]

With ``--verify`` it counts those that change a number in a run, and those of them that ``anytron verify`` alone catches
(verified.py); what is found of each is written to stderr at once::

    python tests/conformance/mutants.py --verify [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console
from rich.progress import Progress

if TYPE_CHECKING:
    from tests.conformance.verified import Finding

HERE = Path(__file__).parent
TESTS = ("test_it_is_caught", "test_a_sabotaged_platform_is_caught")


class Count:
    """Collects the outcomes of the tests of mutants."""

    def __init__(self, progress: Progress) -> None:
        self.caught: list[str] = []
        self.missed: list[str] = []
        self._progress, self._task = progress, progress.add_task("mutants", total=None)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests of mutants."""
        items[:] = [item for item in items if item.name.partition("[")[0] in TESTS]
        self._progress.update(self._task, total=len(items))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of one."""
        name = report.nodeid.partition("[")[2].removesuffix("]")
        if report.when == "call":
            (self.caught if report.passed else self.missed).append(name)
            self._progress.advance(self._task)
        elif report.failed:
            self.missed.append(name)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--verify", action="store_true", help="count those that `anytron verify` catches by itself")
    arguments = parser.parse_args()
    return verify(as_json=arguments.json) if arguments.verify else check(as_json=arguments.json)


def check(*, as_json: bool) -> int:
    """Count those that the kit catches."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        count = Count(progress)
        with contextlib.redirect_stdout(io.StringIO()):
            pytest.main([str(HERE), "-q", "-m", "slow or not slow", "-p", "no:cacheprovider"], plugins=[count])
    missed = sorted(set(count.missed))
    found = {"mutants": len(set(count.caught) | set(missed)), "caught": len(set(count.caught) - set(missed))}
    if as_json:
        print(json.dumps({**found, **({"missed": missed} if missed else {})}))
    else:
        print(f"{found['caught']} of {found['mutants']} broken platforms are caught", *missed, sep="\n  ")
    return 1 if missed or not found["caught"] else 0


def verify(*, as_json: bool) -> int:
    """Count those that change a number, and those of them that ``anytron verify`` catches."""
    sys.path.insert(0, str(HERE.parents[1]))
    from tests.conformance.verified import counted, every_mutant, look_at_all, row
    from tests.warm_python import end_server

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("mutants", total=len(every_mutant()))

        def advance(finding: Finding) -> None:
            progress.console.print(row(finding), markup=False, soft_wrap=True)
            progress.advance(task)

        findings = look_at_all(advance)
    end_server()  # it would outlive this program
    found = counted(findings)
    if as_json:
        print(json.dumps(found))
    else:
        numbers = "of {mutants} broken platforms {change_a_run} change a number in a run"
        print(f"{numbers}, and anytron verify catches {{caught_by_verify}} of them".format(**found))
    return 1 if found["missed"] or not found["change_a_run"] else 0


if __name__ == "__main__":
    sys.exit(main())
