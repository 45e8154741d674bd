"""Kill processes of a run at random, twenty times in a row: ``python tests/faults/random_kills.py``.

Each time ``kill -9`` hits a process of the run, chosen at random, at a moment chosen at random. If that was the driver,
the run is continued with ``resume=auto``; else it must go on by itself. At the end its metrics and weights must be
those of a run to which nothing happened. The choices follow from ``--seed``; what they hit depends on the machine.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.faults.run import Difference, Run  # noqa: E402 - run as a file, the tree is on the path from here on

SETTINGS = ("trainer.max_restarts=1000", "checkpoint.every_steps=1")


def main() -> int:
    """Parse the command line, and do as it says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="default: 20")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--steps", type=int, default=60, help="training steps of the run; default: 60")
    parser.add_argument("--directory", type=Path, help="keep the runs here; default: a directory that is deleted")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="anytron-kills-") as scratch:
        directory = (options.directory or Path(scratch)).absolute()
        for name in ("undisturbed", "killed"):
            (directory / name).mkdir(parents=True)
        began = time.monotonic()
        undisturbed = Run(directory / "undisturbed", steps=options.steps)
        run = Run(directory / "killed", settings=SETTINGS, steps=options.steps)
        try:
            if undisturbed.wait(undisturbed.start()) != 0:
                print(undisturbed.lives[-1].text)
                return 1
            start_s, step_s = pace(undisturbed, began)
            print(f"undisturbed: {start_s:.1f} s to the first step, {step_s:.2f} s for each further one", flush=True)
            if not survive(run, random.Random(options.seed), options.kills, start_s + 6 * step_s):
                return 1
            difference = Difference.between(run, undisturbed)
        finally:
            undisturbed.end()
            run.end()
    print(f"{options.kills} kills, {len(run.lives)} lives; difference to the undisturbed run: {difference}")
    return 0 if difference.none else 1


def pace(run: Run, began: float) -> tuple[float, float]:
    """Measure how long a run takes to its first step, and for each step after it."""
    first = next(moment for moment, steps in run.moments if steps > 0)
    last, steps = run.moments[-1]
    return first - began, (last - first) / max(1, steps - 1)


def survive(run: Run, choices: random.Random, kills: int, longest_s: float) -> bool:
    """Kill processes until it has been often enough, then let the run finish; say whether it did."""
    life = run.start()
    for number in range(1, kills + 1):
        delay, draw = choices.uniform(0.0, longest_s), choices.random()
        until = time.monotonic() + delay
        run.wait(life, until=lambda until=until: time.monotonic() > until)  # type: ignore[misc]
        status = life.process.poll()
        victims = sorted(run.processes().items())
        if status is not None or not victims:
            print(f"kill {number}: there is nobody left, status {status}; raise --steps\n{life.text[-3000:]}")
            return False
        victim, name = victims[int(draw * len(victims))]
        steps = len(run.metrics())
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        if victim == life.process.pid:
            life.process.wait()
            life = run.start()
        print(f"kill {number:2}: after {delay:5.1f} s, step {steps:3}: {name}", flush=True)
    while (status := run.wait(life)) is not None and not run.finished:
        if status != -signal.SIGKILL:
            print(f"the run has ended with status {status}:\n{life.text[-3000:]}")
            return False
        life = run.start()
    return True


if __name__ == "__main__":
    sys.exit(main())
