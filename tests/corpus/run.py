"""Make published faults again, and count those that Anytron's checks catch by the right rule::

    python tests/corpus/run.py [--json] [NAME ...]

A fault counts only if it changes a number: of a run of two steps, or of the rule that catches it. A rule counts only if
the same run without the fault passes it. What is found of each fault is written to stderr at once. The whole takes ten
to fifteen minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from anytron.proof.verification.checks import CHECKS  # noqa: E402
from anytron_conformance.rules import LEVELS, rules_of  # noqa: E402 - run as a file, the tree is on the path now
from tests.conformance.mutant import Unbroken  # noqa: E402
from tests.conformance.verified import Laboratory  # noqa: E402
from tests.corpus.catalog import every_fault, missing  # noqa: E402
from tests.corpus.fault import ENDS  # noqa: E402
from tests.corpus.runs import RUNS  # noqa: E402
from tests.warm_python import end_server  # noqa: E402

if TYPE_CHECKING:
    from tests.conformance.mutant import Mutant
    from tests.corpus.fault import Fault

KIT = {rule.title for level in LEVELS for rule in rules_of(level)} - {check.name for check in CHECKS}
"""Rules that only the kit has; ``anytron verify`` makes the others."""


@dataclass(frozen=True)
class Outcome:
    """What became of a fault.

    Attributes:
        name: Name of the published entry.
        rule: The rule that must catch it.
        changes: What it changes; empty if nothing.
        caught: Whether the rule fails, and passes without the fault.
        seconds: How long both took.
        others: Other checks of ``anytron verify`` that fail.
    """

    name: str
    rule: str
    changes: str
    caught: bool
    seconds: float
    others: tuple[str, ...] = ()


def outcome_of(fault: type[Fault], laboratory: Laboratory, healthy: dict[str, dict[str, str]]) -> Outcome:
    """Make a fault again, and look for it."""
    began = time.monotonic()
    if fault.rule in KIT:
        changes = "" if explained(Unbroken, fault.rule) else explained(fault, fault.rule)
        failing = {fault.rule} if changes else set()
    else:
        if fault.run not in healthy:
            healthy[fault.run] = laboratory.verify(Unbroken, fault.run)
        if fault.changes_a_run:
            finding = laboratory.look(fault, (fault.run,))
            changes, checks = finding.how, finding.checks
            if finding.ended and fault.rule == ENDS and fault.says in finding.how:
                checks = {ENDS: finding.how}
        else:
            checks = laboratory.verify(fault, fault.run)
            changes = checks.get(fault.rule, "")
        failing = checks.keys() - healthy[fault.run].keys()
    others = tuple(sorted(failing - {fault.rule}))
    caught = bool(changes) and fault.rule in failing
    return Outcome(fault.entry(), fault.rule, changes, caught, round(time.monotonic() - began, 1), others)


def explained(platform: type[Mutant], rule: str) -> str:
    """Say how a platform breaks a rule of ``anytron conformance``; empty if it keeps the rule."""
    from tests.conformance.test_mutants import result_of

    with tempfile.TemporaryDirectory() as scratch:
        result = result_of(rule, platform(), Path(scratch))
    return result.explanation if result.status == "failed" else ""


def main() -> int:
    """Parse the command line, and look at all faults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of entries; default: all")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    known = {fault.entry(): fault for fault in every_fault()}
    if unknown := sorted(set(options.names) - known.keys()):
        parser.error(f"no fault is made after {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    chosen = [known[name] for name in options.names or known]
    outcomes = []
    with (
        Progress(console=Console(stderr=True), transient=True) as progress,
        tempfile.TemporaryDirectory() as scratch,
        Laboratory(Path(scratch), RUNS) as laboratory,
    ):
        task, healthy = progress.add_task("published faults", total=len(chosen)), {}
        for fault in chosen:
            outcomes.append(outcome_of(fault, laboratory, healthy))
            progress.console.print(row(outcomes[-1]), markup=False, soft_wrap=True)
            progress.advance(task)
    end_server()
    missed = [one.name for one in outcomes if not one.caught]
    found = {"faults": len(outcomes), "caught": len(outcomes) - len(missed), "missed": missed}
    if options.json:
        print(json.dumps({**found, "not_made_again": sorted(missing()), "outcomes": [asdict(one) for one in outcomes]}))
    else:
        print(f"{found['caught']} of {found['faults']} faults are caught", *missed, sep="\n  missed: ")
        print(f"{len(missing())} published faults are not made again yet")
    return 1 if missed else 0


def row(outcome: Outcome) -> str:
    """Say what became of a fault, in one line."""
    if not outcome.changes:
        return f"{outcome.name}: changes no number ({outcome.seconds} s)"
    caught = f"caught by {outcome.rule}" if outcome.caught else f"NOT caught by {outcome.rule}"
    others = f", and by {', '.join(outcome.others)}" if outcome.others else ""
    return f"{outcome.name}: {outcome.changes.splitlines()[0][:100]}; {caught}{others} ({outcome.seconds} s)"


if __name__ == "__main__":
    sys.exit(main())
