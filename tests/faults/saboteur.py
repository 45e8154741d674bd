"""The saboteur: an extension that waits for its moment inside of a run's processes, and strikes once.

It is a plugin as any other. Its patches wrap the methods of the engines, so that it knows which phase of a step has
begun in which process; nothing in Anytron knows of it. The variable ``ANYTRON_SABOTAGE`` names a directory:

========================  ===========================================================
``blows.json``            what to do: a list of :class:`Blow`
``blow-0``, ``blow-1``    made when a blow was struck, so that no life of the run sees it twice
``trainer-0.pid``, ...    process ids, by role and rank
``run/``                  the run's own directory, whose ``metrics.jsonl`` tells the step
========================  ===========================================================
"""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron import hookimpl
from anytron.device.patches import Patch, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anytron.device.hooks.types import PatchContext

VARIABLE = "ANYTRON_SABOTAGE"
TRAINER = "anytron_megatron.engine:MegatronEngine"
ROLLOUTS = {
    "transformers": "anytron_rollout.transformers_engine:TransformersEngine",
    "vllm": "anytron_vllm.engine:VllmEngine",
}
INSTALLED = "installed"
"""Name, in the variable's directory, of what is on the path of all processes of the run."""
SMALL_FILE = 1024
"""Bytes of the largest file that a process can write where the disk is "full"."""


@dataclass(frozen=True)
class Blow:
    """One thing that happens to a run.

    Attributes:
        place: The call that it waits for: ``trainer.update``, ``rollout.poll``, ``reward.score``, ...
        action: ``kill``, ``stop``, ``terminate``, ``user1`` (signals); ``full disk``, ``no descriptors`` (limits);
            ``lose node`` (of a Ray cluster); ``skip`` (a rank returns from the call without doing it); or what the
            reward does itself: ``hang``, ``raise``, ``exit``, ``leave``, ``nan``.
        victim: Role and rank of the process that it happens to, or ``driver``; default: the one that makes the call.
        after: Steps that must be in ``metrics.jsonl``; from two on, a checkpoint must be complete as well, for what
            comes next is to go on from one.

    A victim that the blow before has killed, and that nobody has missed yet, is waited for: it cannot die twice.
    """

    place: str
    action: str
    victim: str = ""
    after: int = 2


SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM, "user1": signal.SIGUSR1}


class Saboteur:
    """The plugin: it knows the processes of engines, and wraps the calls that blows wait for."""

    @hookimpl
    def patch_model(self, phase: Phase, context: PatchContext) -> list[Patch]:
        if VARIABLE not in os.environ:
            return []
        if phase is Phase.BEFORE_IMPORT:
            enter(f"{context.role}-{os.environ.get('RANK', '0')}")
        when, engine = Phase.BEFORE_BUILD, TRAINER
        if context.role == "rollout":
            when, engine = Phase.BEFORE_IMPORT, ROLLOUTS[context.engine]
        methods = sorted({blow.place.partition(".")[2] for blow in blows() if blow.place.startswith(context.role)})
        if phase is not when:
            return []
        imports = engine.partition(":")[0] if phase is Phase.BEFORE_IMPORT else ""
        return [
            Patch(
                id=f"saboteur.{method}",
                target=f"{engine}.{method}",
                phase=phase,
                reason="a test of faults",
                imports=imports,
                replacement=f"{__name__}:striking_{context.role}",
            )
            for method in methods
        ]


def striking_trainer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Strike when a method of the training engine is called."""
    return _striking("trainer", original)


def striking_rollout(original: Callable[..., Any]) -> Callable[..., Any]:
    """Strike when a method of the rollout engine is called."""
    return _striking("rollout", original)


def _striking(role: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if strike(f"{role}.{original.__name__}") == "skip":
            return None
        return original(*args, **kwargs)

    return call


def enter(name: str) -> None:
    """Let others find this process."""
    if VARIABLE in os.environ:
        (_directory() / f"{name}.pid").write_text(str(os.getpid()))


def strike(place: str) -> str:
    """Strike if it is time: blows come in their order, each once in all lives of a run.

    Returns:
        The action, for what the caller has to do itself; empty if nothing happened.
    """
    if VARIABLE not in os.environ:
        return ""
    for number, blow in enumerate(blows()):
        marker = _directory() / f"blow-{number}"
        if marker.exists():
            continue
        too_early = _steps() < blow.after or (blow.after > 1 and not _saved())
        if blow.place != place or too_early or not _lives(_victim(blow)):
            return ""
        try:
            marker.touch(exist_ok=False)
        except FileExistsError:  # another rank was faster
            return ""
        _act(blow)
        return blow.action
    return ""


def blows() -> list[Blow]:
    """Read what is to be done."""
    return [Blow(**entry) for entry in json.loads((_directory() / "blows.json").read_text())]


def prepare(directory: Path, planned: Sequence[Blow]) -> dict[str, str]:
    """Write blows into a directory, install this extension there, and give the variables of the run's processes."""
    metadata = directory / INSTALLED / "saboteur-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: saboteur\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[anytron.plugins]\nsaboteur = {__name__}:Saboteur\n")
    (directory / "blows.json").write_text(json.dumps([asdict(blow) for blow in planned]))
    root = Path(__file__).parents[2]
    return {VARIABLE: str(directory), "PYTHONPATH": f"{root}{os.pathsep}{metadata.parent}"}


def _act(blow: Blow) -> None:
    victim = _victim(blow)
    if blow.action in SIGNALS:
        os.kill(victim, SIGNALS[blow.action])
        while blow.action == "kill" and _lives(victim):  # it dies in its own time, and the next blow is not for it
            time.sleep(0.01)
    elif blow.action == "full disk":
        _limit(victim, resource.RLIMIT_FSIZE, SMALL_FILE)
    elif blow.action == "no descriptors":
        used = {int(path.name) for path in Path(f"/proc/{victim}/fd").iterdir()}
        _limit(victim, resource.RLIMIT_NOFILE, min(set(range(len(used) + 1)) - used))
    elif blow.action == "lose node":
        os.kill(_ancestor(victim, "raylet"), signal.SIGKILL)


def _victim(blow: Blow) -> int:
    return int((_directory() / f"{blow.victim}.pid").read_text()) if blow.victim else os.getpid()


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _ancestor(process: int, name: str) -> int:
    """Find the process of a name that has started this one, directly or not."""
    while name not in (status := Path(f"/proc/{process}/stat").read_text()).partition(")")[0]:
        process = int(status.rpartition(")")[2].split()[1])
    return process


def _limit(process: int, kind: int, value: int) -> None:
    _, hard = resource.prlimit(process, kind)
    resource.prlimit(process, kind, (value, hard))


def _steps() -> int:
    try:
        return (_directory() / "run" / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def _saved() -> bool:
    return any((_directory() / "run").glob("checkpoints/*/manifest.json"))


def _directory() -> Path:
    return Path(os.environ[VARIABLE])
