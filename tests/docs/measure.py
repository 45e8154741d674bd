"""Measure what the support matrix shows, and write it into ``docs/reference/results``.

``python -m tests.docs.measure [NAME...]`` runs the named measurements, or all those whose platform can be used in this
environment; then it writes the page. What cannot be measured here is named with the reason, and keeps its file. Several
environments are needed for all of them, one after the other: ``tox -e ascend`` makes that of the simulated NPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from anytron.base.errors import AnytronError
from anytron.proof.checks import versions
from anytron_conformance.subject import Source
from tests.docs import support_matrix
from tests.docs.results import Measured
from tests.house import ROOT

PAGE = ROOT / "docs" / "reference" / "support-matrix.md"


@dataclass(frozen=True)
class Measurement:
    """Something to run.

    Attributes:
        platform: What must be usable.
        command: Of this environment's Python: ``-m`` and so on.
        variable: Environment variable that must name a checkout; empty if none must. Tests let their processes import
            it by themselves; for another command it is done here.
    """

    platform: str
    command: tuple[str, ...]
    variable: str = ""

    @property
    def obstacle(self) -> str:
        """Why it cannot be made here; empty if it can."""
        if self.variable and not os.environ.get(self.variable):
            return f"{self.variable} names no checkout"
        try:
            Source(self.platform).open()
        except AnytronError as error:
            return error.why or error.what
        return ""

    def make(self) -> Measured:
        """Run the command.

        Raises:
            SystemExit: It came to nothing.
        """
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            record = Path(scratch) / "outcomes.json"
            of_tests = self.command[0] == "pytest"
            arguments = [*self.command[1:], "-p", "tests.docs.recording", "--record", str(record)]
            command = ["pytest", *arguments] if of_tests else self.command
            path = {} if of_tests or not self.variable else {"PYTHONPATH": os.environ[self.variable]}
            done = subprocess.run(
                [sys.executable, "-m", *command],
                cwd=ROOT,
                env={**os.environ, **path},
                stdout=subprocess.PIPE,
                text=True,
                check=False,
            )
            try:
                found = json.loads(record.read_text(encoding="utf-8") if of_tests else done.stdout)
            except (OSError, ValueError):
                sys.exit(f"{' '.join(command)} ended with status {done.returncode} and no result:\n{done.stdout}")
        return Measured(
            command=" ".join(self.command),
            date=datetime.now(timezone.utc).date().isoformat(),
            seconds=round(time.monotonic() - start),
            versions=versions(),
            found=found,
        )


def measurements() -> dict[str, Measurement]:
    """All of them, by the name of their file."""
    kits = {name: Measurement(kit.platform, kit.command, kit.variable) for name, kit in support_matrix.KITS.items()}
    tests = {
        name: Measurement(
            group.platform,
            ("pytest", *dict.fromkeys(proof.test.partition("[")[0] for proof in group.proofs)),
            group.variable,
        )
        for name, group in support_matrix.GROUPS.items()
    }
    return {**kits, **tests}


def main() -> None:
    known = measurements()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    names = parser.parse_args().names
    for name in names or known:
        if name not in known:
            parser.error(f"there is no measurement {name}: there are {', '.join(known)}")
        obstacle = known[name].obstacle
        if obstacle and names:
            sys.exit(f"{name} cannot be measured here: {obstacle}")
        if obstacle:
            print(f"{name} stays as it is: {obstacle}", file=sys.stderr)
        else:
            print(f"{name}: {' '.join(known[name].command)}", file=sys.stderr)
            known[name].make().write(name)
    PAGE.write_text(support_matrix.render(), encoding="utf-8")


if __name__ == "__main__":
    main()
