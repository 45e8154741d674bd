"""Change a run so that it verifies a shrunk model, with prompts for that model in place of its data."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from anytron.base.errors import ConfigError, within
from anytron.config.load import read_config
from anytron.config.schema import ModelSection
from anytron.config.scoring import REWARD_MODEL
from anytron.proof.shrinking.configuration import Shrunk, impossible, shrink
from anytron.proof.shrinking.inputs import MOST_TOKENS, write_image_processor, write_prompts, write_tokenizer
from anytron.proof.shrinking.weights import write_shrunk_model
from anytron.run.preflight.open_run import open_run
from anytron.run.trainer.models import model_directory
from anytron.task.data.model_files import CONFIG_FILE, read_config_file
from anytron.task.data.pretrained import load_hf_config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from anytron.base.traits import ParallelSizes
    from anytron.config.schema import RunConfig
    from anytron.run.preflight.open_run import OpenRun

_INPUTS = "inputs"


@dataclass(frozen=True)
class ShrunkRun:
    """A run whose models are shrunk.

    Attributes:
        path: The run's configuration.
        relative_to: The directory of relative paths in overrides; None = the directory of the file.
        settings: Keys and sections of it that are replaced.
        model: The shrunk configuration of the policy.
        where: Name of the published configuration in errors.
        lines: What was cut and replaced, for a person.
    """

    path: Path
    relative_to: Path | None
    settings: Mapping[str, Any]
    model: Shrunk
    where: str
    lines: list[str]

    @property
    def facts(self) -> dict[str, Any]:
        """What was cut, as JSON: ``{shrunk: {field: [published, here]}}``."""
        return {"shrunk": {name: list(pair) for name, pair in self.model.cuts.items()}}

    def verdict(self, *, passed: bool) -> str:
        """A line that says what the results are about."""
        about = f"these results are about the shrunk model of {self.where}, with random weights"
        return f"{about}; its published sizes and weights were not tried" if passed else about

    def open(self, overrides: Sequence[str]) -> OpenRun:
        """Open the run with the shrunk model; overrides as in :func:`shrink_run`."""
        return open_run(self.path, overrides, self.relative_to, self.settings)

    def write_model(self, config: RunConfig) -> None:
        """Write the shrunk model where a run writes a model that it makes from ``model.config``.

        Raises:
            ConfigError: The model cannot be shrunk.
        """
        directory = model_directory(config)
        inputs = Path(config.model.tokenizer or "")
        shutil.copytree(inputs, directory)
        write_shrunk_model(
            self.model.fields, self.where, directory, config.model.dtype, config.trainer.seed, kind="causal"
        )


def shrink_run(path: Path, overrides: Sequence[str], scratch: Path) -> ShrunkRun:
    """Read a run, shrink its models, and write tokenizer, prompts, teacher and reward model of the shrunk size.

    Args:
        path: A run's configuration, a published ``config.json``, or its directory. For the last two, the run has
            default settings and computes in float32.
        overrides: Overrides of the configuration.
        scratch: Directory for files.

    Raises:
        ConfigError: The configuration is not valid, or a model cannot be shrunk.
    """
    relative_to = None
    if path.is_dir() or path.suffix == ".json":
        path, relative_to = _write_run(path, scratch), Path.cwd()
    config, _ = read_config(path, overrides, relative_to)
    layout = config.parallel.sizes()
    where, published = _published(config.model, "model.path")
    model = shrink_published(published, where, layout)
    inputs = scratch / _INPUTS
    inputs.mkdir()
    write_tokenizer(model.fields, inputs)
    if model.sees:
        write_image_processor(model.fields, inputs)
    settings, lines = _settings(config, model, inputs, write_prompts(model.fields, scratch, images=model.sees))
    for name, kind in (("teacher", "causal"), (REWARD_MODEL, "scores")):
        if getattr(config, name) is not None:
            shrunk = _write_other(config, name, kind, scratch)
            settings[f"{name}.path"] = str(scratch / name)
            lines += [f"{name}: {line}" for line in shrunk.lines]
    return ShrunkRun(path, relative_to, settings, model, where, [*model.lines, *lines])


def shrink_published(published: dict[str, Any], where: str, layout: ParallelSizes) -> Shrunk:
    """Cut the sizes of a published configuration.

    Args:
        published: A ``config.json``.
        where: Its name in errors.
        layout: Parallel sizes of the run.

    Raises:
        ConfigError: The configuration cannot be shrunk.
    """

    def read(fields: dict[str, Any]) -> Any:
        return load_hf_config(ModelSection.model_construct(path=None, config=fields))

    known: Callable[[dict[str, Any]], Any] | None = read
    try:
        read(published)
    except ConfigError:
        known = None  # the engine's checks know why, and what to do
    try:
        return shrink(published, where, layout, known)
    except (ArithmeticError, AttributeError, IndexError, TypeError, ValueError) as error:  # of a field of another form
        raise impossible(where, f"a field has another form than in published files: {error}") from error


def _write_run(model: Path, scratch: Path) -> Path:
    """Write the configuration of a run of nothing but a model."""
    run = {
        "model": {"path": str(model.resolve()), "dtype": "float32"},
        "data": {"source": "jsonl", "options": {"path": "prompts.jsonl"}},
        "rewards": [_REWARD],
        "trainer": {"output_dir": str(scratch)},
    }
    path = scratch / "run.yaml"
    path.write_text(yaml.safe_dump(run), encoding="utf-8")
    return path


_REWARD = {"function": "format", "options": {"pattern": "."}}


def _published(model: ModelSection, key: str) -> tuple[str, dict[str, Any]]:
    if model.path is None:
        return "model.config", dict(model.config or {})
    path = Path(model.path)
    file = path if path.is_file() else path / CONFIG_FILE
    if not file.is_file():
        raise ConfigError(
            "There is no configuration to shrink.",
            where=key,
            why=f"{file} does not exist",
            fix=f"put the published {CONFIG_FILE} of the model into {path}; no other file of it is needed",
        )
    return str(file), read_config_file(file)


def _settings(config: RunConfig, model: Shrunk, inputs: Path, prompts: Path) -> tuple[dict[str, Any], list[str]]:
    """Replace the sections that are about the published model's tokens, or that checks do not need."""
    judge = [{"function": REWARD_MODEL}] if config.reward_model is not None else []
    settings: dict[str, Any] = {
        "model.path": None,
        "model.config": model.fields,
        "model.tokenizer": str(inputs),
        "model.processor": str(inputs) if model.sees else None,
        "data": {
            "source": "jsonl",
            "options": {"path": str(prompts)},
            "prompts_per_step": config.data.prompts_per_step,
            "max_prompt_tokens": MOST_TOKENS,
        },
        "rewards": [] if config.supervised else [*judge, _REWARD],
        "environment": None,
        "validation": None,
        "checkpoint": {},
        "tracking": {},
        "resume": "never",
        "rollout.stop": [],
    }
    lines = ["tokenizer, prompts and rewards are made for it, in place of the run's"]
    if config.critic is not None and config.critic.path is not None:
        settings["critic.path"] = None
        lines.append("the critic starts from the shrunk model instead of critic.path")
    if config.model.lora is not None and config.model.lora.path is not None:
        settings["model.lora.path"] = None
        lines.append("the adapters are new: model.lora.path has the published sizes")
    return settings, lines


def _write_other(config: RunConfig, name: str, kind: str, scratch: Path) -> Shrunk:
    """Write the teacher or the reward model, with the same tokenizer as the policy."""
    section = getattr(config, name)
    where, published = _published(ModelSection.model_construct(path=section.path, config=None), f"{name}.path")
    with within(name):
        parallel = getattr(section, "parallel", None) or config.parallel
        shrunk = shrink_published(published, where, parallel.sizes())
        directory = scratch / name
        shutil.copytree(scratch / _INPUTS, directory)
        write_shrunk_model(shrunk.fields, where, directory, config.model.dtype, config.trainer.seed + 1, kind)
    return shrunk
