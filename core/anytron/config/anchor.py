"""Make the paths in a configuration absolute, so that it means the same wherever it is read next.

A run writes its configuration into its own directory, and worker processes, plugins and engines read
it too: none of them has to know where the YAML file lay. ``trainer.output_dir`` stays as it is; it is
relative to the directory that a run is started in, not to the file.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from anytron.config.schema import DataSection, RunConfig


def anchor(config: RunConfig, directory: Path) -> RunConfig:
    """Resolve relative paths against a directory.

    These are ``model.path``, ``model.tokenizer``, ``model.processor``, ``model.lora.path``, ``critic.path``, the
    file in every ``file.py:function`` and ``file.py:Class``, the option ``path`` of a registered ``data.source``, and
    ``rollout.python`` (whose links stay: an environment is known by the path of its interpreter).

    Args:
        config: As read.
        directory: Where the YAML file lies.
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
    rewards = [
        reward.model_copy(update={"function": _reference(reward.function, directory)}) for reward in config.rewards
    ]
    critic = config.critic
    if critic is not None and critic.path is not None:
        critic = critic.model_copy(update={"path": _absolute(critic.path, directory)})
    environment = config.environment
    if environment is not None:
        environment = environment.model_copy(update={"path": _reference(environment.path, directory)})
    sinks = [one.model_copy(update={"sink": _reference(one.sink, directory)}) for one in config.tracking.sinks]
    python = config.rollout.python
    rollout = {} if python is None else {"python": os.path.abspath(directory / python)}  # noqa: PTH100 - no links
    return config.model_copy(
        update={
            "critic": critic,
            "environment": environment,
            "rollout": config.rollout.model_copy(update=rollout),
            "model": config.model.model_copy(update=changed),
            "data": _data(config.data, directory),
            "rewards": rewards,
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


def _reference(reference: str, directory: Path) -> str:
    """``file.py:function`` with an absolute file; modules and registered names as they are."""
    location, colon, function = reference.rpartition(":")
    return f"{_absolute(location, directory)}:{function}" if colon and location.endswith(".py") else reference


def _directory_or_function(reference: str | None, directory: Path) -> str | None:
    if reference is None:
        return None
    return _reference(reference, directory) if ":" in reference else _absolute(reference, directory)


def _data(data: DataSection, directory: Path) -> DataSection:
    path = data.options.get("path")
    update: dict[str, object] = {"source": _reference(data.source, directory)}
    if ":" not in data.source and isinstance(path, str):
        update["options"] = {**data.options, "path": _absolute(path, directory)}
    return data.model_copy(update=update)
