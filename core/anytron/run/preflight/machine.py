"""Check that a run can work on this machine, before a model is built or a process started."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from anytron.base.components import EXECUTORS, ROLLOUT_ENGINES, TRAINING_ENGINES, find_component, load_component
from anytron.base.errors import ConfigError
from anytron.base.files import exhausted
from anytron.base.version import __version__, installable
from anytron.config.diagnostics import Diagnostic
from anytron.run.preflight.capabilities import weight_diagnostics
from anytron.run.preflight.settings import sequence_parallel_diagnostics
from anytron.task.data.model_files import faults
from anytron.task.data.pretrained import directory_diagnostics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.config.schema import ModelSection, RunConfig
    from anytron.device.platform import Platform, Probe

_ASK = "import sys; sys.path[:] = filter(None, sys.path); import anytron; print(anytron.__version__)"
"""Program that prints an interpreter's version of Anytron. As in workers, the current directory is not on the path."""
_ANSWER_S = 60.0
"""Seconds that an interpreter may take to start, from a slow disk."""


def interpreter_diagnostics(key: str, python: str) -> Iterator[Diagnostic]:
    """Find out whether an interpreter starts, and has this version of Anytron.

    Args:
        key: The configuration key that names the interpreter.
        python: Path or command of the interpreter.
    """
    try:
        done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=_ANSWER_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        if (known := exhausted(error, python)) is not None:
            raise known from error
        fix = "set it to the path of a Python interpreter, for example venv/bin/python"
        yield Diagnostic("error", key, f"{python} cannot be run: {error}", fix)
        return
    if done.returncode != 0 or not done.stdout.strip():
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        fix = f"run {python} -m pip install {installable(__version__)}"
        yield Diagnostic("error", key, f"Anytron cannot be imported with {python}: {last}", fix)
    elif (found := done.stdout.strip()) != __version__:
        message = f"{python} has Anytron {found}, but this process runs {__version__}: both must be the same version"
        yield Diagnostic("error", key, message, f"run {python} -m pip install {installable(__version__)}")


def machine_diagnostics(config: RunConfig, platform: Platform, probe: Probe) -> Iterator[Diagnostic]:
    """Find what cannot work on this machine, or is probably a mistake.

    Args:
        config: The configuration, its paths absolute, with the edits of plugins.
        platform: The active platform.
        probe: Result of the platform's probe.

    Yields:
        Errors: components that are not installed, more ranks than devices, a model directory without config or weights,
        weights that cannot be streamed or compared as asked, an interpreter without this version of Anytron. Warning:
        more ranks than CPUs.
    """
    yield from _components(config)
    yield from _devices(config, platform, probe)
    yield from _model(config.model)
    yield from _critic(config)
    yield from _teacher(config)
    yield from _reward_model(config)
    yield from weight_diagnostics(config)
    if config.rollout.python is not None and runs_here(config):
        yield from interpreter_diagnostics("rollout.python", config.rollout.python)


def _components(config: RunConfig) -> Iterator[Diagnostic]:
    for group, name, key in (
        (EXECUTORS, config.executor.kind, "executor.kind"),
        (TRAINING_ENGINES, config.engine.name, "engine.name"),
        (ROLLOUT_ENGINES, config.rollout.engine, "rollout.engine"),
    ):
        try:
            # The executor is imported in this process anyway; engines are not.
            (load_component if group == EXECUTORS else find_component)(group, name, key)
        except ConfigError as error:  # noqa: PERF203 - collected with the others
            yield Diagnostic("error", key, f"{error.what.removesuffix('.')}; {error.why}", error.fix)


def _model(model: ModelSection) -> Iterator[Diagnostic]:
    if model.path is None:
        for field, fault in faults(model.config or {}):
            yield Diagnostic("error", f"model.config.{field}", fault)
        return
    directory = Path(model.path)
    fix = "complete the download, or set model.config instead of model.path to start from random weights"
    yield from directory_diagnostics("model.path", directory, fix)
    if directory.is_dir() and model.tokenizer is None and not any(directory.glob("tokenizer*")):
        fix = "set model.tokenizer to a directory with a tokenizer"
        yield Diagnostic("error", "model.path", f"{directory} has no tokenizer", fix)


def _critic(config: RunConfig) -> Iterator[Diagnostic]:
    critic = config.critic
    if critic is None:
        return
    if config.policy_steps < 1:
        yield Diagnostic(
            "error",
            "critic.warmup_steps",
            f"it must be below trainer.total_steps ({config.trainer.total_steps}), or the policy is never trained",
            f"set it to at most {config.trainer.total_steps - 1}",
        )
    if critic.path is not None:
        yield from directory_diagnostics(
            "critic.path", Path(critic.path), "remove critic.path to start from the policy's model"
        )


def _teacher(config: RunConfig) -> Iterator[Diagnostic]:
    if config.teacher is not None:
        fix = "complete the download; a run writes its model to hf/ in its output directory"
        yield from _with_tokenizer("teacher.path", Path(config.teacher.path), fix)


def _reward_model(config: RunConfig) -> Iterator[Diagnostic]:
    section = config.reward_model
    if section is None:
        return
    yield from _with_tokenizer("reward_model.path", Path(section.path), "complete the download")
    ranks, hosts, key = section.parallel.world_size, config.parallel.world_size, "reward_model.parallel"
    if ranks > hosts:
        message = f"the reward model's {ranks} ranks share the devices of {ranks} training ranks, "
        message += f"but the run has only {hosts}"
        yield Diagnostic("error", key, message, f"lower a size in {key}, or raise a size in parallel")
    yield from sequence_parallel_diagnostics(section.parallel, f"{key}.")


def _with_tokenizer(key: str, directory: Path, fix: str) -> Iterator[Diagnostic]:
    """Check the directory of a model that scores the policy's tokens."""
    yield from directory_diagnostics(key, directory, fix)
    if directory.is_dir() and not any(directory.glob("tokenizer*")):
        message = f"{directory} has no tokenizer, so the meaning of its token ids is unknown"
        yield Diagnostic("error", key, message, f"copy the model's tokenizer files to {directory}")


def _devices(config: RunConfig, platform: Platform, probe: Probe) -> Iterator[Diagnostic]:
    ranks = config.parallel.world_size
    if config.rollout.placement == "separate":
        yield from _separate_devices(config, platform, probe)
    if platform.accelerator and ranks > probe.devices and runs_here(config):
        # Experts take no ranks of their own.
        names = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel", "data_parallel")
        product = " x ".join(f"{name} {getattr(config.parallel, f'{name}_size')}" for name in names)
        devices = f"{probe.devices} device{'' if probe.devices == 1 else 's'}"
        yield Diagnostic(
            "error",
            "parallel",
            f"{product} = {ranks} ranks, but {platform.name} has {devices} here ({probe.reason})",
            "lower one of these sizes",
        )
    processors = len(os.sched_getaffinity(0))
    if not platform.accelerator and ranks > processors and runs_here(config):
        message = f"{ranks} training ranks share {processors} CPUs: the run works but is slow"
        yield Diagnostic("warning", "parallel", message, "lower a size in section parallel")


def _separate_devices(config: RunConfig, platform: Platform, probe: Probe) -> Iterator[Diagnostic]:
    ranks, replicas, obstacle = config.parallel.world_size, config.rollout.replicas, None
    if not platform.accelerator or platform.visible_devices_variable is None:
        obstacle = f"{platform.name} cannot reserve devices for rollout processes"
    elif ranks <= probe.devices < ranks + replicas and runs_here(config):
        obstacle = (
            f"{platform.name} has {probe.devices} device{'' if probe.devices == 1 else 's'}, but {ranks} training "
            f"rank{'' if ranks == 1 else 's'} and {replicas} replica{'' if replicas == 1 else 's'} need one each"
        )
    if obstacle is not None:
        yield Diagnostic("error", "rollout.placement", obstacle, "set rollout.placement=colocated")


def runs_here(config: RunConfig) -> bool:
    """Whether all ranks run on this machine, on its devices and CPUs."""
    try:
        return bool(load_component(EXECUTORS, config.executor.kind, "executor.kind").on_this_machine)
    except ConfigError:
        return True  # it is not installed, or fails to import: _components reports both
