"""Check the files that a run reads and writes."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from anytron.config.data import OPTION_PATHS
from anytron.config.diagnostics import Diagnostic
from anytron.config.imports import missing
from anytron.record.tracking.claim import overwritten
from anytron.run.preflight.capabilities import generates_in_training, saves_checkpoints, why_a_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.config.schema import RunConfig


STATE_FACTOR = {"bfloat16": 7, "float32": 3}
"""By ``model.dtype``: size of a checkpoint divided by the size of the weights.

A checkpoint holds the weights, Adam's two moments in float32 and, with bfloat16, a float32 copy of the weights.
"""


def reference_diagnostics(config: RunConfig) -> Iterator[Diagnostic]:
    """Find files, directories and functions that the configuration names and that do not exist."""
    named = _references(config)
    for key, reference in (("model.tokenizer", config.model.tokenizer), ("model.processor", config.model.processor)):
        if reference is not None and ":" in reference:
            named[key] = reference
        elif reference is not None and not Path(reference).is_dir():
            yield Diagnostic(
                "error",
                key,
                f"there is no directory {reference}",
                "set it to a local directory, relative to the YAML file, or to 'file.py:function'",
            )
    for key, reference in named.items():
        yield from missing(reference, key)


def output_diagnostics(config: RunConfig, file: Path) -> Iterator[Diagnostic]:
    """Find problems with the places that a run writes to.

    Args:
        config: The configuration, its paths absolute.
        file: The YAML file that it comes from.

    Yields:
        Errors: an output directory that cannot be written, files in it that the run needs and ``trainer.overwrite``
        would delete, too little disk space for the weights. Warning: too little disk space for the checkpoints.
    """
    path = Path(config.trainer.output_dir).absolute()
    existing = _existing(path)
    if not existing.is_dir():
        yield Diagnostic(
            "error",
            "trainer.output_dir",
            f"{existing} is not a directory",
            "set trainer.output_dir to a directory that you can write into",
        )
        return
    if not os.access(existing, os.W_OK | os.X_OK):
        yield Diagnostic(
            "error",
            "trainer.output_dir",
            f"{existing} is not writable",
            "set trainer.output_dir to a directory that you can write into",
        )
    if config.trainer.overwrite:
        for key, needed in _needed(config, file).items():
            if overwritten(path, needed):
                yield Diagnostic(
                    "error",
                    "trainer.overwrite",
                    f"it would delete {key} ({needed}), which is among the files of the earlier run",
                    "set trainer.output_dir to a different directory",
                )
    yield from _room(config, path)


def _needed(config: RunConfig, file: Path) -> dict[str, Path]:
    """The files and directories that a run reads, by the key that names them."""
    model, lora, critic = config.model, config.model.lora, config.critic
    named = {
        "model.path": model.path,
        "model.tokenizer": model.tokenizer,
        "model.processor": model.processor,
        "model.lora.path": None if lora is None else lora.path,
        "critic.path": None if critic is None else critic.path,
        "teacher.path": None if config.teacher is None else config.teacher.path,
        "reward_model.path": None if config.reward_model is None else config.reward_model.path,
    }
    for key, one in config.data.keyed_sources().items():
        named |= {f"{key}.options.{option}": one.options.get(option) for option in OPTION_PATHS}
    named |= _references(config) | validation_files(config)
    named |= {f"tracking.sinks.{index}.sink": one.sink for index, one in enumerate(config.tracking.sinks)}
    paths = {key: Path(value.rpartition(":")[0] or value) for key, value in named.items() if isinstance(value, str)}
    # Registered names and modules are no absolute paths; files and directories are (anytron.config.anchor).
    return {"the configuration": file} | {key: path for key, path in paths.items() if path.is_absolute()}


def _references(config: RunConfig) -> dict[str, str]:
    """The sources, functions and environments that a run names, by key: registered names, modules or files."""
    named = {f"{key}.source": one.source for key, one in config.data.keyed_sources().items()}
    named |= {"algorithm.advantage": config.algorithm.advantage, "algorithm.loss": config.algorithm.loss}
    named |= {f"rewards.{index}.function": reward.function for index, reward in enumerate(config.rewards)}
    if config.environment is not None:
        key, called = config.environment.called
        named[key] = config.environment.command[0] if config.environment.command else called
    return named | validation_references(config)


def validation_references(config: RunConfig) -> dict[str, str]:
    """Return the prompt sources and reward functions of all validation sets, by their configuration keys."""
    found: dict[str, str] = {}
    for index, one in enumerate([] if config.validation is None else config.validation.sets):
        sources = one.data.keyed_sources(f"validation.sets.{index}.data")
        found |= {f"{key}.source": source.source for key, source in sources.items()}
        for place, reward in enumerate(one.rewards):
            found[f"validation.sets.{index}.rewards.{place}.function"] = reward.function
    return found


def validation_files(config: RunConfig) -> dict[str, str]:
    """Return the prompt files of all validation sets, by their configuration keys."""
    sets = [] if config.validation is None else config.validation.sets
    return {
        f"{key}.options.path": path
        for index, one in enumerate(sets)
        for key, source in one.data.keyed_sources(f"validation.sets.{index}.data").items()
        if isinstance(path := source.options.get("path"), str)
    }


def _room(config: RunConfig, path: Path) -> Iterator[Diagnostic]:
    if config.model.path is None:
        return
    weights = sum(part.stat().st_size for part in Path(config.model.path).glob("*.safetensors") if part.is_file())
    places = {"TMPDIR": Path(tempfile.gettempdir())} if goes_through_a_file(config) else {}
    if config.trainer.save_hf:
        places["trainer.output_dir"] = path
    for key, place in places.items():
        free = shutil.disk_usage(_existing(place)).free
        if free < weights:
            yield Diagnostic(
                "error",
                key,
                f"{place} has {_size(free)} of free space, but a copy of the weights takes {_size(weights)}",
                f"free disk space, or set {key} to a directory on another disk",
            )
    if config.model.lora is None and saves_checkpoints(config):
        best = config.validation is not None and config.validation.keep_best
        place = path if config.checkpoint.path is None else Path(config.checkpoint.path).absolute()
        count = config.checkpoint.keep + best + 1  # an old one goes when the new one is complete
        needed, free = weights * STATE_FACTOR[config.model.dtype] * count, shutil.disk_usage(_existing(place)).free
        if free < needed:
            yield Diagnostic(
                "warning",
                "checkpoint.keep",
                f"{place} has {_size(free)} of free space, but {count} checkpoints take about {_size(needed)}",
                "free disk space, lower checkpoint.keep, or set checkpoint.path to a directory on another disk",
            )


def goes_through_a_file(config: RunConfig) -> bool:
    """Whether weights go to the rollout through a file."""
    way = config.rollout.weights
    if generates_in_training(config):
        return False
    return way == "file" or (way == "auto" and why_a_file(config) is not None)


def _existing(path: Path) -> Path:
    """The path, or the nearest directory above it that exists."""
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _size(count: int) -> str:
    return f"{count / 1e9:.3g} GB"
