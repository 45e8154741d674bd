"""Kill a replica every few seconds, while agents use the endpoint: ``python tests/faults/killed_replicas.py``.

The run has three replicas. Every ``--every`` seconds ``kill -9`` hits one of their processes, in turn. The run
must go on by itself. Its weights must be those of an undisturbed run bit for bit, and its metrics must be the same but
for rounding: another replica computes a conversation's beginning in another batch.
"""

from __future__ import annotations

import argparse
import json
import os
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

TASK = ROOT / "examples" / "grpo_calculator_agent.yaml"
REPLICA = "rollout-"
"""How the names of replicas begin, in the saboteur's files."""
ROUNDING = 1e-6


def main() -> int:
    """Parse the command line, carry out both runs, and compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="training steps; default: 100")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two kills; default: 5")
    parser.add_argument("--replicas", type=int, default=3, help="default: 3")
    parser.add_argument("--task", type=Path, default=TASK, help="default: examples/grpo_calculator_agent.yaml")
    parser.add_argument("--directory", type=Path, help="keep the runs here; default: a directory that is deleted")
    parser.add_argument("settings", nargs="*", help="overrides of the configuration, for both runs")
    options = parser.parse_args()
    settings = (f"rollout.replicas={options.replicas}", "trainer.max_restarts=100000", *options.settings)
    with tempfile.TemporaryDirectory(prefix="anytron-kills-") as scratch:
        directory = (options.directory or Path(scratch)).absolute()
        runs = {
            name: Run(directory / name, settings=settings, steps=options.steps, task=options.task.absolute())
            for name in ("undisturbed", "killed")
        }
        try:
            for name, run in runs.items():
                run.directory.mkdir(parents=True)
                began = time.monotonic()
                kills = finish(run, options.every if name == "killed" else float("inf"))
                print(f"{name}: {time.monotonic() - began:.0f} s, {kills} kills, {summary(run)}", flush=True)
                if not run.finished:
                    print(run.lives[-1].text[-3000:])
                    return 1
            difference = Difference.between(runs["killed"], runs["undisturbed"])
        finally:
            for run in runs.values():
                run.end()
    print(f"difference to the undisturbed run: {difference}")
    return 0 if kills and difference.same_bytes and difference.metrics < ROUNDING else 1


def finish(run: Run, every_s: float) -> int:
    """Carry out a run to its end, and kill a replica every so many seconds; return how many were killed."""
    life, kills = run.start(), 0
    while True:
        next_kill = time.monotonic() + every_s
        if run.wait(life, lambda until=next_kill: time.monotonic() > until) is not None:
            return kills
        replicas = sorted((name, number) for number, name in run.processes().items() if name.startswith(REPLICA))
        if not replicas or not run.metrics():
            continue  # they are still starting
        with suppress(ProcessLookupError):
            os.kill(replicas[kills % len(replicas)][1], signal.SIGKILL)
            kills += 1


def summary(run: Run) -> str:
    """Say what a run has lost, and its reward in the last tenth of its steps."""
    metrics, lost = run.metrics(), run.output / "losses.jsonl"
    last = metrics[-max(1, len(metrics) // 10) :]
    reward = sum(one["reward/mean"] for one in last) / max(1, len(last))
    dropped = sum(one.get("environment/failed", 0) for one in metrics)
    losses = [json.loads(line) for line in lost.read_text().splitlines()] if lost.exists() else []
    return f"{len(losses)} losses recorded, {dropped:g} agents dropped, reward {reward:.3f} in the last steps"


if __name__ == "__main__":
    sys.exit(main())
