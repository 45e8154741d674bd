"""Let every fault happen to a run, and print a line for each: ``python tests/faults/run_all.py``.

A line says whether the run survived, how many seconds it took to be further than before, and what its end has
different from that of a run to which nothing happened. The exit status is 1 if a fault was not survived.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.faults.catalog import FAULTS  # noqa: E402 - run as a file, the tree is on the path from here on
from tests.faults.faults import Fault, Outcome, survive, undisturbed  # noqa: E402

if TYPE_CHECKING:
    from tests.faults.run import Run


def main() -> int:
    """Parse the command line, and do as it says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the names of the faults and end")
    parser.add_argument(
        "--only",
        metavar="WORDS",
        action="append",
        help="faults with these words in their name, and the rest of their series",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list at the end, and the lines as errors")
    parser.add_argument("--directory", type=Path, help="keep the runs here; default: a directory that is deleted")
    options = parser.parse_args()
    wanted = [fault for fault in FAULTS if not options.only or _is_meant(fault, options.only)]
    if options.list:
        print(*(name for fault in wanted for name in fault.names), sep="\n")
        return 0
    if not wanted:
        parser.error("no fault has these words in its name; --list prints all names")
    output = sys.stderr if options.json else sys.stdout
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="anytron-faults-") as scratch:
        outcomes = let_happen(wanted, options.directory or Path(scratch), output)
    survived = sum(outcome.survived for outcome in outcomes)
    print(f"{survived} of {len(outcomes)} survived, in {time.monotonic() - began:.0f} s", file=output)
    if options.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=2))
    return 0 if survived == len(outcomes) else 1


def let_happen(faults: list[Fault], directory: Path, output: TextIO) -> list[Outcome]:
    """Let faults happen one after the other; print a line for each as soon as it is known."""
    references: dict[tuple[str, ...], Run] = {}
    outcomes: list[Outcome] = []
    for number, fault in enumerate(faults, start=1):
        if output.isatty():
            print(f"[{number}/{len(faults)}] {fault} ...", end="\033[K\r", file=output, flush=True)
        if fault.layout not in references:
            references[fault.layout] = undisturbed(_new(directory, f"undisturbed-{len(references)}"), fault.layout)
        found = survive(fault, _new(directory, f"fault-{number:02}"), references[fault.layout])
        outcomes += found
        print(*map(as_line, found), sep="\n", file=output, flush=True)
    return outcomes


def _is_meant(fault: Fault, patterns: list[str]) -> bool:
    return any(words in name for words in patterns for name in fault.names)


def as_line(outcome: Outcome) -> str:
    """Show an outcome to people."""
    recovery = "" if outcome.seconds is None else f"{outcome.seconds:.1f} s"
    verdict = "survived" if outcome.survived else "NOT SURVIVED"
    return f"{outcome.fault:<52} {verdict:<12} {recovery:>7}  {outcome.difference}"


def _new(directory: Path, name: str) -> Path:
    path = directory.absolute() / name
    path.mkdir(parents=True)
    return path


if __name__ == "__main__":
    sys.exit(main())
