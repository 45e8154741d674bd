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

MOST_STEPS = 4
"""Steps between two kills, at most: they take much less time than a start."""
SETTINGS = ("trainer.max_restarts=1000", "checkpoint.every_steps=1")


def main() -> int:
    """Parse the command line, and do as it says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="default: 20")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--steps", type=int, help=f"training steps of the run; default: {MOST_STEPS + 1} for each kill")
    parser.add_argument("--directory", type=Path, help="keep the runs here; default: a directory that is deleted")
    options = parser.parse_args()
    total = options.steps or (MOST_STEPS + 1) * options.kills
    with tempfile.TemporaryDirectory(prefix="anytron-kills-") as scratch:
        directory = (options.directory or Path(scratch)).absolute()
        for name in ("undisturbed", "killed"):
            (directory / name).mkdir(parents=True)
        began = time.monotonic()
        undisturbed = Run(directory / "undisturbed", steps=total)
        run = Run(directory / "killed", settings=SETTINGS, steps=total)
        try:
            if undisturbed.wait(undisturbed.start()) != 0:
                print(undisturbed.lives[-1].text)
                return 1
            start_s, step_s = pace(undisturbed, began)
            print(f"undisturbed: {start_s:.1f} s to the first step, {step_s:.2f} s for each further one", flush=True)
            if not survive(run, random.Random(options.seed), options.kills, start_s, step_s):
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


def survive(run: Run, choices: random.Random, kills: int, start_s: float, step_s: float) -> bool:
    """Kill processes until it has been often enough, then let the run finish; say whether it did.

    A moment lies within the time of a start, or within a step, whichever comes first.
    """
    life = run.start()
    for number in range(1, kills + 1):
        delay, enough, within = (
            choices.uniform(0.0, start_s),
            choices.randint(1, MOST_STEPS),
            choices.uniform(0.0, step_s),
        )
        draw, began, before = choices.random(), time.monotonic(), len(run.metrics())

        def due(until: float = began + delay, steps: int = before + enough) -> bool:
            return time.monotonic() > until or len(run.metrics()) >= steps

        run.wait(life, due)
        time.sleep(within)
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
        print(f"kill {number:2}: after {time.monotonic() - began:5.1f} s, {steps:3} steps done: {name}", flush=True)
    while (status := run.wait(life)) is not None and not run.finished:
        if status != -signal.SIGKILL:
            print(f"the run has ended with status {status}:\n{life.text[-3000:]}")
            return False
        life = run.start()
    return True


if __name__ == "__main__":
    sys.exit(main())
