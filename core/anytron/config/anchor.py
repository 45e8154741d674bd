"""Make the paths in a configuration absolute, so that they do not depend on where the configuration is read.

A run writes its configuration into its own directory, and worker processes, plugins and engines read
it too: they need not know in which directory the YAML file was. ``trainer.output_dir`` stays as it is; it is
relative to the directory that a run is started in, not to the file.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from anytron.config.data import OPTION_PATHS, SOURCE_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from anytron.config.data import DataSection, MixedSource
    from anytron.config.schema import RunConfig
    from anytron.config.scoring import RewardSection, ValidationSection


def anchor(config: RunConfig, directory: Path) -> RunConfig:
    """Resolve relative paths against a directory.

    The paths are ``model.path``, ``model.tokenizer``, ``model.processor``, ``model.lora.path``, ``critic.path``,
    ``teacher.path``, ``reward_model.path``, the file in every ``file.py:function`` and ``file.py:Class``, the paths
    among the options of registered sources of prompts, ``rollout.python`` (its symbolic links stay, because an
    environment is identified by the path of its interpreter), ``rollout.endpoint.key_file``, and the program of
    ``environment.command`` if it has a directory. The paths in ``validation.sets`` are resolved too.

    Args:
        config: The configuration, as read from the file.
        directory: Directory of the YAML file.
    """
    model = {
        "path": None if config.model.path is None else _absolute(config.model.path, directory),
        "tokenizer": _directory_or_function(config.model.tokenizer, directory),
        "processor": _directory_or_function(config.model.processor, directory),
    }
    changed: dict[str, object] = {name: value for name, value in model.items() if value is not None}
    if config.model.lora is not None and config.model.lora.path is not None:
        path = _absolute(config.model.lora.path, directory)
        changed["lora"] = config.model.lora.model_copy(update={"path": path})
    critic = config.critic
    if critic is not None and critic.path is not None:
        critic = critic.model_copy(update={"path": _absolute(critic.path, directory)})
    teacher = config.teacher
    if teacher is not None:
        teacher = teacher.model_copy(update={"path": _absolute(teacher.path, directory)})
    reward_model = config.reward_model
    if reward_model is not None:
        reward_model = reward_model.model_copy(update={"path": _absolute(reward_model.path, directory)})
    environment = config.environment
    if environment is not None:
        named = {"path": environment.path, "agent": environment.agent}
        found: dict[str, object] = {key: _reference(name, directory) for key, name in named.items() if name is not None}
        if environment.command:
            found["command"] = [_program(environment.command[0], directory), *environment.command[1:]]
        environment = environment.model_copy(update=found)
    sinks = [one.model_copy(update={"sink": _reference(one.sink, directory)}) for one in config.tracking.sinks]
    python, endpoint = config.rollout.python, config.rollout.endpoint
    rollout: dict[str, object] = {}
    if python is not None:
        rollout["python"] = os.path.abspath(directory / python)  # noqa: PTH100 - no links
    if endpoint is not None and endpoint.key_file is not None:
        rollout["endpoint"] = endpoint.model_copy(update={"key_file": _absolute(endpoint.key_file, directory)})
    return config.model_copy(
        update={
            "critic": critic,
            "teacher": teacher,
            "reward_model": reward_model,
            "environment": environment,
            "rollout": config.rollout.model_copy(update=rollout),
            "model": config.model.model_copy(update=changed),
            "data": _data(config.data, directory),
            "rewards": _rewards(config.rewards, directory),
            "validation": None if config.validation is None else _validation(config.validation, directory),
            "tracking": config.tracking.model_copy(update={"sinks": sinks}),
            "algorithm": config.algorithm.model_copy(
                update={
                    "advantage": _reference(config.algorithm.advantage, directory),
                    "loss": _reference(config.algorithm.loss, directory),
                }
            ),
        }
    )


def _absolute(path: str, directory: Path) -> str:
    return str((directory / path).resolve())


def _program(name: str, directory: Path) -> str:
    """A program's file with an absolute path; a name without a directory is looked up in PATH later.

    Symbolic links stay: an interpreter's path decides about its environment.
    """
    return os.path.abspath(directory / name) if "/" in name else name  # noqa: PTH100 - no links


def _reference(reference: str, directory: Path) -> str:
    """``file.py:function`` with an absolute file; modules and registered names as they are."""
    location, colon, function = reference.rpartition(":")
    return f"{_absolute(location, directory)}:{function}" if colon and location.endswith(".py") else reference


def _directory_or_function(reference: str | None, directory: Path) -> str | None:
    if reference is None:
        return None
    return _reference(reference, directory) if ":" in reference else _absolute(reference, directory)


def _data(data: DataSection, directory: Path) -> DataSection:
    update: dict[str, object] = {"mix": [one.model_copy(update=_source(one, directory)) for one in data.mix]}
    if data.source is not None:
        update |= _source(data, directory)
    return data.model_copy(update=update)


def _rewards(rewards: Sequence[RewardSection], directory: Path) -> list[RewardSection]:
    return [reward.model_copy(update={"function": _reference(reward.function, directory)}) for reward in rewards]


def _validation(validation: ValidationSection, directory: Path) -> ValidationSection:
    sets = [
        one.model_copy(update={"data": _data(one.data, directory), "rewards": _rewards(one.rewards, directory)})
        for one in validation.sets
    ]
    return validation.model_copy(update={"sets": sets})


def _source(section: DataSection | MixedSource, directory: Path) -> dict[str, object]:
    source, options = section.source or "", section.options
    if source in SOURCE_OPTIONS:
        given = {name: options[name] for name in OPTION_PATHS if isinstance(options.get(name), str)}
        options = {**options, **{name: _absolute(path, directory) for name, path in given.items()}}
    return {"source": _reference(source, directory), "options": options}
