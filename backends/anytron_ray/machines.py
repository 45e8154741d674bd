"""Check the machines of a run and the connections between them, before a process is started on them."""

from __future__ import annotations

import contextlib
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from anytron.base.errors import ProcessLost
from anytron.run.preflight.capabilities import generates_in_training
from anytron.run.preflight.files import goes_through_a_file
from anytron_ray import cluster
from anytron_ray.findings import Machine, Obstacle, ahead, compared, partners
from anytron_ray.introduction import REACHED_S, SEEN_S, Doorstep, Question, introduce, written

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anytron.config.schema import RunConfig
    from anytron_ray.agent import Place
    from anytron_ray.findings import Finding

ANSWER_S = 15.0
"""Seconds in which an agent must answer, in addition to the time limit of what it is asked to do."""


@dataclass(frozen=True)
class Member:
    """The Ray agent that represents one machine in the checks between machines.

    Attributes:
        actor: Ray's handle of the agent.
        place: The agent's machine, and its resources there.
    """

    actor: Any
    place: Place


def one_of_each(actors: Sequence[Any], places: Sequence[Place]) -> list[Member]:
    """Choose the first agent of each machine, in their order."""
    members: dict[str, Member] = {}
    for actor, place in zip(actors, places, strict=True):
        members.setdefault(place.host.id, Member(actor, place))
    return list(members.values())


def shared_directories(config: RunConfig) -> dict[str, str]:
    """The directories that all machines of a run must share, by the key that names them."""
    directories = {"trainer.output_dir": config.trainer.output_dir}
    if config.checkpoint.path is not None:
        directories["checkpoint.path"] = config.checkpoint.path
    if not config.supervised and goes_through_a_file(config):
        directories["TMPDIR"] = tempfile.gettempdir()
    return directories


def paths_read(config: RunConfig) -> dict[str, str]:
    """The paths that training ranks and rollout processes read and that exist on this machine, by configuration key.

    A path that is missing on this machine is reported by the checks of the configuration.
    """
    model, loss = config.model, config.algorithm.loss
    named = {
        "model.path": model.path,
        "model.tokenizer": _file_of(model.tokenizer),
        "model.processor": _file_of(model.processor),
        "model.lora.path": None if model.lora is None else model.lora.path,
        "critic.path": None if config.critic is None else config.critic.path,
        "teacher.path": None if config.teacher is None else config.teacher.path,
        "reward_model.path": None if config.reward_model is None else config.reward_model.path,
        "rollout.python": config.rollout.python,
        "algorithm.loss": _file_of(loss) if ".py:" in loss else None,
    }
    return {key: path for key, path in named.items() if path is not None and Path(path).exists()}


def examine(members: Sequence[Member], config: RunConfig) -> tuple[list[Machine], list[Finding]]:
    """Ask each machine about itself, and let the machines connect to each other.

    Args:
        members: One agent of each machine, that of rank 0 first.
        config: The run's configuration, which names the directories and paths.

    Returns:
        The machines in the order of ``members``, and what is wrong with them.

    Raises:
        ConfigError: The driver cannot write into a directory that the machines share.
        ProcessLost: An agent or its machine is gone.
        ResourceError: A file system is full, or fails.
    """
    shared, paths = shared_directories(config), paths_read(config)
    here = cluster.this_host()
    doorstep = Doorstep()
    # Rank 0 connects to the driver to send weights; whatever else the driver hears comes through Ray.
    called = members[0].place.host.id != here.id and _sends_weights(config)
    with written(shared) as notes, contextlib.ExitStack() as opened:
        own = introduce(Question({}, {}, here.address if called else None), doorstep)
        opened.callback(doorstep.close)
        driver = Machine(here.address, None, own)
        apart = len(members) > 1
        questions = [Question(notes, paths, one.place.host.address if apart else None) for one in members]
        clocks = [_clock(one) for one in members]
        said = _asked(members, lambda one, index: one.actor.introduce.remote(questions[index]), SEEN_S)
        machines = [
            Machine(one.place.host.address, one.place.interface, answer, ahead_s)
            for one, answer, ahead_s in zip(members, said, clocks, strict=True)
        ]
        found = _unreached(members, machines, driver if called else None)
        return machines, compared(driver, machines, {**shared, **paths}, found)


def _unreached(members: Sequence[Member], machines: Sequence[Machine], driver: Machine | None) -> list[Obstacle]:
    """Let each machine connect to its partners, and rank 0's to the driver.

    Raises:
        ProcessLost: A machine does not say in time which machines it reaches.
    """
    targets = [[machines[one] for one in partners(index, len(machines))] for index in range(len(machines))]
    if driver is not None:
        targets[0].append(driver)
    open_doors = [
        [(one, one.said.port) for one in row if one.said is not None and one.said.port is not None] for row in targets
    ]
    if not any(open_doors):
        return []
    asked = [[(machine.address, port) for machine, port in row] for row in open_doors]
    answers = _asked(members, lambda one, index: one.actor.obstacles.remote(asked[index]), REACHED_S)
    _asked(members, lambda one, _: one.actor.hush.remote(), 0.0)
    if silent := [machine.name for machine, whys in zip(machines, answers, strict=True) if whys is None]:
        raise ProcessLost(
            f"{', '.join(silent)} did not say in time which other machines it can reach.",
            where="executor.kind=ray",
            why=f"the Ray agent there gave no answer within {REACHED_S + ANSWER_S:g} s",
            fix="check the load of each of these machines and its connection to the Ray cluster",
        )
    return [
        Obstacle(source.name, target.name, port, why)
        for source, row, whys in zip(machines, open_doors, answers, strict=True)
        for (target, port), why in zip(row, whys, strict=True)
        if why
    ]


def _clock(member: Member) -> float:
    """Ask for the time on a machine; return by how much it is ahead of the driver's at least, in seconds."""
    before = time.time()
    (clock,) = _asked([member], lambda one, _: one.actor.clock.remote(), 0.0)
    return 0.0 if clock is None else ahead(clock, before, time.time())


def _asked(members: Sequence[Member], ask: Callable[[Member, int], Any], further_s: float) -> list[Any]:
    """Call all agents at the same time; None for one that does not answer in time.

    Raises:
        ProcessLost: An agent or its machine is gone.
    """
    answers = [ask(one, index) for index, one in enumerate(members)]
    deadline = time.monotonic() + further_s + ANSWER_S
    given: list[Any] = []
    for member, answer in zip(members, answers, strict=True):
        try:
            given.append(ray.get(answer, timeout=max(0.0, deadline - time.monotonic())))
        except GetTimeoutError:  # noqa: PERF203 - each agent may be the one that does not answer
            given.append(None)
        except RayError as error:
            raise ProcessLost(
                f"The machine {member.place.host.address} was lost before a process was started on it.",
                where="executor.kind=ray",
                why=str(error),
                fix="check with `ray status` that this machine is in the cluster, and its network connection",
            ) from error
    return given


def _sends_weights(config: RunConfig) -> bool:
    """Whether rank 0 connects to the driver, when rollout processes take weights over the network."""
    return not (config.supervised or generates_in_training(config) or goes_through_a_file(config))


def _file_of(reference: str | None) -> str | None:
    """The directory or file that a reference names, which may be ``file.py:function``; None if it names none."""
    if reference is None or ":" not in reference:
        return reference
    file = reference.rpartition(":")[0]
    return file if file.endswith(".py") else None
