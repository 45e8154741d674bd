"""Make published faults again, and count those that Anytron's checks catch by the right rule::

    python tests/corpus/run.py [--json] [--processes N] [NAME ...]

A fault counts only if it changes a number: of a run of two steps, or of the rule that catches it. A rule counts only if
the same run without the fault passes it. What is found of each fault is written to stderr at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import Progress

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from anytron.proof.verification.checks import CHECKS  # noqa: E402 - run as a file, the tree is on the path now
from anytron_conformance.rules import LEVELS, rules_of  # noqa: E402
from tests.conformance.mutant import Unbroken  # noqa: E402
from tests.conformance.verified import Healthy, Laboratory  # noqa: E402
from tests.corpus.catalog import every_fault, missing  # noqa: E402
from tests.corpus.fault import ENDS  # noqa: E402
from tests.corpus.runs import RUNS  # noqa: E402
from tests.warm_python import end_server, server_session  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from tests.corpus.fault import Fault

PROCESSES = min(4, len(os.sched_getaffinity(0)))
"""Faults that are looked for at the same time; each needs up to four processes, which wait for each other."""
REBUILDING = frozenset(
    {
        "learning-rates",
        "packed-equals-padded",
        "parallel-equals-single",
        "recomputed-equals-kept",
        "resumed-equals-continued",
    }
)
"""Checks that build the engine once more: they are made of a run only if one of its faults has such a rule."""
KIT = {rule.title for level in LEVELS for rule in rules_of(level)} - {check.name for check in CHECKS}
"""Rules of ``anytron conformance``; a name that ``anytron verify`` has too is that of its check."""


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


class Here:
    """What a process of the pool has for itself."""

    laboratory: Laboratory


def open_laboratory() -> None:
    """Open a laboratory in a process of the pool, and close it when the process ends."""
    torch.set_num_threads(1)  # the other processes use the other cores
    stack = ExitStack()
    scratch = stack.enter_context(tempfile.TemporaryDirectory())
    Here.laboratory = stack.enter_context(Laboratory(Path(scratch), RUNS))
    Finalize(None, stack.close, exitpriority=1)


def healthy_of(run: str, left_out: frozenset[str]) -> Healthy:
    """Find what a run is without a fault."""
    Here.laboratory.left_out = left_out
    return Here.laboratory.healthy(run)


def outcome_of(fault: type[Fault], healthy: Healthy | None, left_out: frozenset[str] = frozenset()) -> Outcome:
    """Make a fault again, and look for it; a rule of the kit needs no run."""
    began = time.monotonic()
    if healthy is None:
        changes = explained(fault)
        failing = {fault.rule} if changes else set()
    else:
        Here.laboratory.left_out = left_out
        Here.laboratory.know(fault.run, healthy)
        if fault.changes_a_run:
            finding = Here.laboratory.look(fault, (fault.run,))
            changes, checks = finding.how, finding.checks
            if finding.ended and fault.rule == ENDS and fault.says in finding.how:
                checks = {ENDS: finding.how}
        else:
            checks = Here.laboratory.verify(fault, fault.run)
            changes = checks.get(fault.rule, "")
        failing = checks.keys() - healthy.checks.keys()
    others = tuple(sorted(failing - {fault.rule}))
    caught = bool(changes) and fault.rule in failing
    return Outcome(fault.entry(), fault.rule, changes, caught, round(time.monotonic() - began, 1), others)


def outcomes_of(faults: list[type[Fault]], processes: int) -> Iterator[Outcome]:
    """Look for faults in several processes, each of which has a laboratory; a run without a fault is made once."""
    todo: deque[tuple[Any, ...]] = deque((outcome_of, fault, None) for fault in faults if fault.rule in KIT)
    of_run: dict[str, list[type[Fault]]] = {}
    for fault in faults:
        if fault.rule not in KIT:
            of_run.setdefault(fault.run, []).append(fault)
    left_out = {run: REBUILDING - {fault.rule for fault in those} for run, those in of_run.items()}
    todo.extend((healthy_of, run, left_out[run]) for run in of_run)
    server_session()  # the processes share its imports
    running: dict[Future[Any], tuple[Any, ...]] = {}
    with ProcessPoolExecutor(processes, get_context("fork"), open_laboratory) as pool:
        while todo or running:
            while todo and len(running) < processes:
                task = todo.popleft()
                running[pool.submit(*task)] = task
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                function, subject, *_ = running.pop(future)
                if function is healthy_of:
                    found = future.result()
                    todo.extendleft((outcome_of, one, found, left_out[subject]) for one in reversed(of_run[subject]))
                else:
                    yield future.result()
    end_server()


def explained(fault: type[Fault]) -> str:
    """Say how a fault breaks a rule of ``anytron conformance`` that the processor keeps; empty if it does not."""
    from tests.conformance.test_mutants import result_of

    with tempfile.TemporaryDirectory() as scratch:
        result, healthy = (result_of(fault.rule, one(), Path(scratch)) for one in (fault, Unbroken))
    return result.explanation if (result.status, healthy.status) == ("failed", "passed") else ""


def main() -> int:
    """Parse the command line, and look at all faults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of entries; default: all")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--processes", type=int, default=PROCESSES, metavar="N", help="faults at a time")
    options = parser.parse_args()
    known = {fault.entry(): fault for fault in every_fault()}
    if unknown := sorted(set(options.names) - known.keys()):
        parser.error(f"no fault is made after {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    chosen = [known[name] for name in options.names or known]
    outcomes = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("published faults", total=len(chosen))
        for outcome in outcomes_of(chosen, min(options.processes, len(chosen))):
            outcomes.append(outcome)
            progress.console.print(row(outcome), markup=False, soft_wrap=True)
            progress.advance(task)
    outcomes.sort(key=lambda outcome: [*known].index(outcome.name))
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
