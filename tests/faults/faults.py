"""The faults that a run must survive, and the proof that it did: its end is that of an undisturbed run."""

from __future__ import annotations

import json
import os
import pickle
import signal
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tests.faults.run import STEPS, Difference, Life, Run
from tests.faults.saboteur import INSTALLED, VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.faults.saboteur import Blow

LIVES = 16
"""Starts after which a run that is still not finished is given up."""
PROCESSES = 4
"""Of a run: driver, rank, rollout and reward."""


@dataclass(frozen=True)
class Fault:
    """One fault, or a series of faults that happen to one run, one after the other: each costs one start less.

    Attributes:
        names: For people and ``--only``: of the fault, or one for each blow of a series.
        blows: What the saboteur does.
        ends: How a life ends in which it happens: ``goes on`` (the run finishes without help), ``killed``,
            ``saved`` (status 0, to be continued), or ``error`` (status 1 and a message).
        says: Words of that life's output.
        begin: Begins that life, and may do something to it from outside; default: it is only started.
        between: Done to the run's files after that life.
        settings: Overrides of the configuration in that life.
        layout: Overrides of the configuration in all lives, and of the undisturbed run that it is compared with.
    """

    names: tuple[str, ...]
    blows: tuple[Blow, ...] = ()
    ends: str = "goes on"
    says: str = ""
    begin: Callable[[Run], Life] | None = None
    between: Callable[[Run], None] | None = None
    settings: tuple[str, ...] = ()
    layout: tuple[str, ...] = ()

    def __str__(self) -> str:
        others = len(self.names) - 1
        return self.names[0] + (f" and {others} more" if others else "")


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        fault: The fault's name.
        survived: Whether it ended as the undisturbed run.
        seconds: From the fault until the run trains again; None if no step was left to be done.
        difference: To the undisturbed run, for people; or why it did not survive.
        lives: How often the run was started, over its whole series.
    """

    fault: str
    survived: bool
    seconds: float | None
    difference: str
    lives: int


class NotSurvivedError(Exception):
    """A run did not come through; the text says why."""


def undisturbed(directory: Path, layout: tuple[str, ...] = ()) -> Run:
    """Do a run to which nothing happens."""
    run = Run(directory, settings=layout)
    try:
        if run.wait(run.start()) != 0 or not run.finished:
            raise NotSurvivedError(f"the undisturbed run has failed:\n{_tail(run)}")
    finally:
        run.end()
    return run


def survive(fault: Fault, directory: Path, reference: Run) -> list[Outcome]:
    """Let a fault happen to a run, continue the run to its end, and compare it with the undisturbed one."""
    run = Run(directory, fault.blows, fault.layout)
    try:
        happened = _happen(fault, run)
        while not run.finished:
            _again(run)
        if left := run.leftovers():
            raise NotSurvivedError(f"processes are left: {left}")
        difference = Difference.between(run, reference)
        if not difference.none:
            raise NotSurvivedError(str(difference))
    except (NotSurvivedError, TimeoutError) as error:
        reasons = [str(error), *["its series has failed"] * (len(fault.names) - 1)]
        return [
            Outcome(name, False, None, reason, len(run.lives))
            for name, reason in zip(fault.names, reasons, strict=True)
        ]
    finally:
        run.end()
    recoveries = _recoveries(run, happened)[-len(fault.names) :]
    return [
        Outcome(name, True, seconds, str(difference), len(run.lives))
        for name, seconds in zip(fault.names, recoveries, strict=True)
    ]


def _happen(fault: Fault, run: Run) -> list[float]:
    """Live until every blow is struck; return when they were."""
    moments: list[float] = []
    begin = fault.begin or (lambda run: run.start(*fault.settings))
    while len(moments) < max(1, len(fault.blows)):
        life = _again(run, begin)
        after = run.struck() if fault.blows else [life.began]
        if len(after) == len(moments):
            raise NotSurvivedError(f"blow {len(moments)} did not happen:\n{_tail(run)}")
        moments = after
        status = life.process.returncode
        ended = {0: "goes on" if run.finished else "saved", 1: "error", -9: "killed"}.get(status, f"status {status}")
        if ended != fault.ends:
            raise NotSurvivedError(f"expected was: {fault.ends}; it was: {ended}\n{_tail(run)}")
        if fault.says not in life.text or life.crashed:
            raise NotSurvivedError(f"it does not say {fault.says!r}, or too much:\n{_tail(run)}")
    if fault.between is not None:
        fault.between(run)
    return moments


def _again(run: Run, begin: Callable[[Run], Life] = Run.start) -> Life:
    """Live once more, to the end of that life."""
    if len(run.lives) == LIVES:
        raise NotSurvivedError(f"it has not finished in {LIVES} lives:\n{_tail(run)}")
    life = begin(run)
    run.wait(life)
    return life


def _recoveries(run: Run, happened: list[float]) -> list[float | None]:
    """Seconds from each blow to the next one, for which its victim must live again, or to the next step that is done.

    A step that other processes complete before the loss is noticed does not count.
    """
    since = max(happened[-1], run.lives[-1].began, run.noticed)
    pairs = pairwise(run.moments)
    trains = next((moment for (_, before), (moment, steps) in pairs if moment > since and steps > before), None)
    return [until and until - moment for moment, until in zip(happened, [*happened[1:], trains], strict=True)]


def _tail(run: Run) -> str:
    return run.lives[-1].text[-3000:] if run.lives else ""


# ---- what happens to files, and from outside -----------------------------------------------------


def _newest(run: Run) -> Path:
    if not run.checkpoints:
        raise NotSurvivedError(f"there is no checkpoint:\n{_tail(run)}")
    return run.checkpoints[-1]


def _largest(checkpoint: Path) -> Path:
    return max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def truncate(run: Run) -> None:
    """Cut the largest file of the newest checkpoint in half."""
    file = _largest(_newest(run))
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(run: Run) -> None:
    """Change one bit of the largest file of the newest checkpoint."""
    file = _largest(_newest(run))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def damage_manifest(run: Run) -> None:
    """Leave the newest checkpoint half a manifest."""
    manifest = _newest(run) / "manifest.json"
    os.truncate(manifest, manifest.stat().st_size // 2)


def lose_a_file(run: Run) -> None:
    """Delete the largest file of the newest checkpoint."""
    _largest(_newest(run)).unlink()


class Malicious:
    """An object that runs a command when it is unpickled."""

    def __init__(self, evidence: Path) -> None:
        self._evidence = evidence

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._evidence),)


def replace_pickles(run: Run) -> None:
    """Replace everything in the newest checkpoint that might be unpickled, checksums included, and try to resume.

    It must be refused and must not run. Then the victim deletes the checkpoint.
    """
    checkpoint, evidence = _newest(run), run.directory / "was-run"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    content = pickle.dumps(Malicious(evidence))
    for name, record in manifest["files"].items():
        if name != "driver.json":
            (checkpoint / name).write_bytes(content)
            record.update(size=len(content), sha256=sha256(content).hexdigest())
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    life = run.start()
    status = run.wait(life)
    if evidence.exists():
        raise NotSurvivedError("the checkpoint ran code")
    if status != 1 or life.crashed:
        raise NotSurvivedError(f"expected was a refusal; status {status}:\n{life.text[-3000:]}")
    for file in sorted(checkpoint.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    checkpoint.rmdir()


def second_run(run: Run) -> Life:
    """Start the same run a second time while the first one has the directory: only the second one ends."""
    first = run.start()
    run.wait(first, until=lambda: len(run.metrics()) > 0)
    first.process.send_signal(signal.SIGSTOP)  # it would be over before the second one looks
    second = run.start()
    status = run.wait(second)
    first.process.send_signal(signal.SIGCONT)
    if status != 1 or second.crashed:
        raise NotSurvivedError(f"the second run in the directory: status {status}:\n{second.text[-3000:]}")
    return first


def close_output(run: Run) -> Life:
    """Read one line of what the run writes, and then no more."""
    reader, writer = os.pipe()
    life = run.start(into=writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as output:
        output.readline()
    return life


JUMPING = f"""
import os, time

began = time.monotonic()

def jumping(clock, day):
    def now():
        jumps = int(4 * (time.monotonic() - began))
        return clock() + jumps * (day if jumps % 4 else -day)
    return now

time.time, time.time_ns = jumping(time.time, 86_400), jumping(time.time_ns, 86_400 * 10**9)
with open(f"{{os.environ[{VARIABLE!r}]}}/jumping-{{os.getpid()}}", "x"):
    pass
"""
"""What each Python process of a run does first: four times a second its wall clock jumps, by days, forth or back."""


def with_jumping_clocks(run: Run) -> Life:
    """Live where the wall clocks jump. No limit of the run is as long as a jump, nor is the time between its saves."""
    (run.directory / INSTALLED).mkdir()
    (run.directory / INSTALLED / "sitecustomize.py").write_text(JUMPING)
    return run.start("checkpoint.every_steps=null", "checkpoint.every_minutes=600")


def nobody_looked_at_the_clock(run: Run) -> None:
    """No process was taken for lost, and no checkpoint was due before the last step."""
    if (processes := len(list(run.directory.glob("jumping-*")))) < PROCESSES:
        raise NotSurvivedError(f"the clocks of only {processes} processes jumped:\n{_tail(run)}")
    steps = [int(path.name.removeprefix("step-")) for path in run.checkpoints]
    if run.noticed or steps != [STEPS]:
        raise NotSurvivedError(f"checkpoints of the steps {steps}, or a loss:\n{_tail(run)}")


def in_a_ray_cluster(run: Run) -> Life:
    """Live in a cluster of a head without processors and of two nodes, each of which can hold the whole run."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a token would be left in the home directory
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    small = {"num_gpus": 0, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=2, **small)
        life = run.start("executor.kind=ray", RAY_ADDRESS=cluster.address)
        run.wait(life)
    finally:
        cluster.shutdown()
    return life
