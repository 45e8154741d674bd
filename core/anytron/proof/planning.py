"""The device memory that a run needs, as its engines estimate it before anything starts, and settings that need less.

``anytron plan`` and ``anytron doctor`` show the results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anytron.base.components import ROLLOUT_ENGINES, TRAINING_ENGINES, component_names, engine_info
from anytron.base.errors import ConfigError
from anytron.config.running import EngineSection
from anytron.workers.engines.estimates import MemoryPart, peak

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from anytron.base.components import EngineInfo
    from anytron.config.schema import RunConfig
    from anytron.workers.engines.estimates import DeviceMemory, TrainingEstimate


ROOM = 0.9
"""Part of a device's memory that a plan may use: more leaves too little for fragmentation and libraries' own memory."""
DRIVER_BYTES = 305 << 20
"""Anonymous memory of the driver: Python, torch, transformers and the data. Measured with examples/grpo_sort.yaml on
Linux x86-64 (``RssAnon`` of ``/proc/<pid>/status``)."""
LIBRARY_BYTES = 110 << 20
"""Resident files of the driver, of which torch's libraries are the most (``RssFile``). The other processes map the same
files, so that a machine holds them once."""


@dataclass(frozen=True)
class Share:
    """Processes of one kind on a device.

    Attributes:
        who: Role of each process: ``training rank``, ``reward model rank``, ``rollout replica`` or ``driver``.
        count: Number of such processes on the device.
        parts: Memory of each process on the device, part by part.
    """

    who: str
    count: int
    parts: tuple[MemoryPart, ...]

    @property
    def slug(self) -> str:
        """``who`` with hyphens instead of spaces, for the names of results."""
        return self.who.replace(" ", "-")

    @property
    def peak(self) -> int:
        """Largest memory of one of the processes, in bytes."""
        return peak(self.parts)


@dataclass(frozen=True)
class DevicePlan:
    """The processes on one device: the one that needs the most memory among the devices of its kind.

    Attributes:
        name: Kind of device: ``training``, ``rollout`` or ``machine``.
        shares: The processes on the device, by kind.
        total: Memory of the device in bytes; None = not known.
    """

    name: str
    shares: tuple[Share, ...]
    total: int | None

    @property
    def crowd(self) -> str:
        """The processes on the device in words, for messages: ``2 training ranks and 1 driver``."""
        counted = [f"{share.count} {share.who}{'s' * (share.count > 1)}" for share in self.shares]
        return " and ".join(filter(None, [", ".join(counted[:-1]), counted[-1]]))

    @property
    def place(self) -> str:
        """The device in words, for messages: ``the machine`` or ``a device``."""
        return "the machine" if self.name == "machine" else "a device"

    @property
    def needed(self) -> int:
        """Bytes in use at the peak; training and generation take turns if they share the device."""
        return peak([part for share in self.shares for part in share.parts * share.count])

    @property
    def fits(self) -> bool | None:
        """Whether the device has enough memory; None if its memory is not known."""
        return None if self.total is None else self.needed <= self.total

    @property
    def tight(self) -> bool:
        """Whether the processes fit, but use more than :data:`ROOM` of the device's memory."""
        return self.total is not None and ROOM * self.total < self.needed <= self.total


@dataclass(frozen=True)
class Plan:
    """The device memory that a run needs.

    Attributes:
        devices: Plans of the devices, one for each kind.
        parameters: Number of the model's parameters.
        silent: Engines that give no estimate; their memory is missing in the plan.
    """

    devices: tuple[DevicePlan, ...]
    parameters: int
    silent: tuple[str, ...] = ()

    @property
    def needed(self) -> int:
        """Bytes on the fullest device."""
        return max(device.needed for device in self.devices)

    @property
    def fits(self) -> bool | None:
        """Whether every device has enough memory; None if that is not known."""
        answers = {device.fits for device in self.devices}
        return None if None in answers else False not in answers


def as_installed(run: RunConfig) -> tuple[RunConfig, str]:
    """Replace a training engine that no installed distribution offers by the default one with its default options.

    Returns:
        The configuration, and a description of the replacement; empty if the engine is installed.
    """
    asked, default = run.engine.name, EngineSection().name
    if asked in component_names(TRAINING_ENGINES):
        return run, ""
    engine = run.engine.model_copy(update={"name": default, "options": {}})
    done = f"no installed distribution offers the engine {asked}: estimated as {default} with its default options"
    return run.model_copy(update={"engine": engine}), done


def make_plan(run: RunConfig, device: DeviceMemory, prompt_tokens: float | None = None) -> Plan:
    """Estimate the memory that the run needs on its devices, from the configuration alone.

    One training rank is assumed on each accelerator. On the CPU, all processes share the machine's memory.

    Args:
        run: The configuration.
        device: Memory of each device.
        prompt_tokens: Mean length of a prompt, or of an example with its response; None = not known, and all
            micro-batches are taken to be full.

    Raises:
        ConfigError: The training engine gives no estimate, or the sizes of the model are not known.
    """
    trains = engine_info(TRAINING_ENGINES, run.engine.name, "engine.name")
    generates = engine_info(ROLLOUT_ENGINES, run.rollout.engine, "rollout.engine")
    estimate, of_replica = trains.load_memory(), generates.load_memory()
    if estimate is None:
        raise ConfigError(
            "The memory of this run cannot be estimated.",
            where="engine.name",
            why=f"the engine {run.engine.name} has no memory estimate",
            fix="start with a small engine.max_tokens_per_micro_batch "
            "and watch the device's memory with its vendor's tool",
        )
    training: TrainingEstimate = estimate(run if prompt_tokens is None else _of_real_size(run, prompt_tokens))
    rank = [*training.parts, *_process(trains, device)]
    replica: list[MemoryPart] = []
    if of_replica is not None and not run.supervised:
        replica = [*of_replica(run, training, device), *_process(generates, device)]
    if generates.part_of:  # every training rank generates, and there is no other process
        rank, replica = [*rank, *replica], []
    scoring: list[MemoryPart] = []
    if run.reward_model is not None and trains.reward_model is not None:
        scoring = [
            *trains.reward_model.load_memory()(run.of_reward_model).parts,
            *_process(trains.reward_model, device),
        ]
    silent = (run.rollout.engine,) if of_replica is None and not run.supervised else ()
    return Plan(tuple(_devices(run, tuple(rank), tuple(scoring), tuple(replica), device)), training.parameters, silent)


def _of_real_size(run: RunConfig, prompt_tokens: float) -> RunConfig:
    """Lower ``engine.max_tokens_per_micro_batch`` to what a mini-batch of a data-parallel rank has at most."""
    if run.environment is not None:  # nobody knows how long a conversation becomes
        return run
    shares = run.algorithm.mini_batches * run.parallel.data_parallel_size
    sequences = math.ceil(run.data.prompts_per_step * run.group_size / shares)
    tokens = math.ceil(sequences * (prompt_tokens + (0 if run.supervised else run.rollout.max_new_tokens)))
    largest = min(tokens, run.engine.max_tokens_per_micro_batch)
    return run.model_copy(update={"engine": run.engine.model_copy(update={"max_tokens_per_micro_batch": largest})})


def _process(engine: EngineInfo, device: DeviceMemory) -> list[MemoryPart]:
    """Return the memory that Python and its libraries take in a process that computes on the CPU."""
    if device.accelerator or not engine.process_bytes:
        return []
    return [MemoryPart("process", engine.process_bytes, "Python and the imported packages, as measured")]


def _devices(
    run: RunConfig,
    rank: tuple[MemoryPart, ...],
    scoring: tuple[MemoryPart, ...],
    replica: tuple[MemoryPart, ...],
    device: DeviceMemory,
) -> Sequence[DevicePlan]:
    """Plan the fullest device of each kind."""
    scoring_ranks = 0 if run.reward_model is None else run.reward_model.parallel.world_size

    def shares(ranks: int, replicas: int) -> tuple[Share, ...]:
        all_kinds = (
            Share("training rank", ranks, rank),
            Share("reward model rank", min(ranks, scoring_ranks), scoring),
            Share("rollout replica", replicas, replica),
        )
        return tuple(share for share in all_kinds if share.count and share.parts)

    if not device.accelerator:
        driver = (
            MemoryPart("process", DRIVER_BYTES, "Python and the imported packages, as measured"),
            MemoryPart("libraries", LIBRARY_BYTES, "their files: the machine holds them once for all processes"),
        )
        everything = (*shares(run.parallel.world_size, run.rollout.replicas), Share("driver", 1, driver))
        return [DevicePlan("machine", everything, device.total)]
    if run.rollout.placement == "colocated":
        return [DevicePlan("training", shares(1, 1), device.total)]
    apart = [DevicePlan("training", shares(1, 0), device.total)]
    return apart + ([DevicePlan("rollout", shares(0, 1), device.total)] if replica else [])


WORTH = 0.02
"""Smallest part of the needed memory that a setting must save to be proposed."""
SMALLEST_MICRO_BATCH = 1024
"""Fewest tokens of a micro-batch that are proposed: a micro-batch must hold the longest sequence."""


@dataclass(frozen=True)
class Remedy:
    """Settings that lower the memory of the fullest device.

    Attributes:
        overrides: The settings as on the command line, ``key=value``.
        needed: Bytes on the fullest device with these settings.
        fits: Whether every device then has enough memory; None if that is not known.
    """

    overrides: tuple[str, ...]
    needed: int
    fits: bool | None


def remedies(
    run: RunConfig, plan: Plan, replan: Callable[[Sequence[str]], Plan | None]
) -> tuple[list[Remedy], Remedy | None]:
    """Try each setting of :func:`candidates` alone, and then those that help together.

    Args:
        run: The configuration.
        plan: Plan of the run.
        replan: Function that returns the plan with more overrides; None if the configuration refuses them.

    Returns:
        The settings that each save at least :data:`WORTH` of the memory, the largest saving first; and, if the run is
        known not to fit, settings among them that together make it fit (None if there are none).
    """
    helpful = []
    for override in candidates(run):
        tried = replan([override])
        if tried is not None and plan.needed - tried.needed >= WORTH * plan.needed:
            helpful.append(Remedy((override,), tried.needed, tried.fits))
    together = _together(plan, [one.overrides[0] for one in helpful], replan) if plan.fits is False else None
    return sorted(helpful, key=lambda one: one.needed), together


def candidates(run: RunConfig) -> Iterator[str]:
    """Yield settings to try, as overrides: first those that cost time, then more devices, then changes of training."""
    engine, rollout, parallel = run.engine, run.rollout, run.parallel
    if rollout.placement == "colocated" and rollout.engine != engine.name and not rollout.sleep:
        yield "rollout.sleep=true"
    if rollout.max_batch_size > 1:
        yield f"rollout.max_batch_size={-(-rollout.max_batch_size // 4)}"
    if not engine.distributed_optimizer:
        yield "engine.distributed_optimizer=true"
    if engine.max_tokens_per_micro_batch // 2 >= SMALLEST_MICRO_BATCH:
        yield f"engine.max_tokens_per_micro_batch={engine.max_tokens_per_micro_batch // 2}"
    if engine.recompute != "full":
        yield "engine.recompute=full"
    parts = ["optimizer", "gradients", *([] if run.teacher is None else ["teacher"])]
    if missing := [name for name in parts if name not in engine.offload]:
        yield f"engine.offload=[{', '.join([*engine.offload, *missing])}]"
    if run.reward_model is not None and not run.reward_model.offload:
        yield "reward_model.offload=true"
    for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size"):
        yield f"parallel.{key}={2 * getattr(parallel, key)}"
    if run.model.lora is None:
        yield "model.lora={rank: 16}"


def _together(plan: Plan, overrides: Sequence[str], replan: Callable[[Sequence[str]], Plan | None]) -> Remedy | None:
    """Add settings one by one until the run fits, and remove those that turn out to be unnecessary."""
    chosen: list[str] = []
    reached = plan
    for override in overrides:
        tried = replan([*chosen, override])
        if tried is None or tried.needed >= reached.needed:
            continue
        chosen.append(override)
        reached = tried
        if tried.fits:
            break
    else:
        return None
    for override in chosen[:-1]:
        rest = [one for one in chosen if one != override]
        tried = replan(rest)
        if tried is not None and tried.fits:
            chosen, reached = rest, tried
    return Remedy(tuple(chosen), reached.needed, fits=True)
