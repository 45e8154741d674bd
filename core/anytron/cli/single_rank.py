"""``checkpoint export`` and ``replay``: start the training engine of a run alone, on one rank of this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from anytron.base.components import EXECUTORS, load_component
from anytron.base.errors import CheckpointError, ConfigError, DataError
from anytron.cli.output import ScratchDirectory, error_console
from anytron.config.diagnostics import refuse
from anytron.config.dump import to_yaml
from anytron.config.load import load_config
from anytron.config.schema import RunConfig
from anytron.record.checkpoint.directory import locate
from anytron.run.preflight.capabilities import replay_diagnostics
from anytron.run.preflight.open_run import open_run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anytron.record.checkpoint.directory import Checkpoint
    from anytron.run.trainer.non_finite import BadUpdate, ReplayResult
    from anytron.workers.engines.training_engine import NonFinite


_ALONE = (
    "parallel={}",
    "executor.kind=local",
    "data.mix=[]",
    "data.source=jsonl",
    "data.options={path: unread}",
    "environment=null",
    "validation=null",
    "rewards=[{function: exact_match}]",
    "reward_model=null",
    "rollout={samples_per_prompt: 2, max_new_tokens: 1}",  # what fits every algorithm and every model
    "checkpoint={}",
    "resume=never",
)
_UNTAUGHT = ("teacher=null", "algorithm.distillation_coefficient=0")
_CHUNKS = "virtual_pipeline_model_parallel_size"


def alone(config: RunConfig) -> list[str]:
    """Return the overrides that reduce a run to its training engine on one rank.

    Prompts, rewards, environment, validation, rollout engine, teacher and reward model are not used; placeholders that
    need no files and no packages replace them.

    Args:
        config: Configuration of the run.
    """
    chunks = [f"engine.options.{_CHUNKS}=1"] if _CHUNKS in config.engine.options else []
    rewarded = ["algorithm.advantage=grpo"] if config.algorithm.advantage == "none" else []
    return [*_ALONE, *(_UNTAUGHT if config.teacher is not None else ()), *rewarded, *chunks]


def override(key: str, value: object) -> str:
    """Write an override whose value is quoted: YAML might read a plain path as another type."""
    return f"{key}={json.dumps(str(value))}"


_POLICY_ALONE = ("algorithm={}", "critic=null", "teacher=null")
"""Neither a critic nor a reference model nor a teacher is loaded."""


def export_model(path: Path, out: Path, overrides: Sequence[str]) -> None:
    """Write the model of a checkpoint.

    Args:
        path: A checkpoint; or a directory of checkpoints or of a run, whose newest one is taken.
        out: The output directory; it must not exist.
        overrides: Changes of the run's configuration, for example the new path of its model; relative paths are
            relative to the current directory.

    Raises:
        AnytronError: The checkpoint is damaged or would run code, ``out`` exists, or the run cannot be set up here.
    """
    if out.exists():
        raise ConfigError(
            "The output directory already exists.", where=str(out), fix="give another OUT, or delete the directory"
        )
    checkpoint = locate(path)
    checkpoint.verify()
    notes = error_console()
    write_model(checkpoint, out, overrides, "anytron checkpoint export PATH OUT", notes.print)
    notes.print(f"the model after step {checkpoint.step}: {out}")


def write_model(
    checkpoint: Checkpoint, out: Path, overrides: Sequence[str], command: str, tell: Callable[[str], None]
) -> None:
    """Write the model of a checkpoint that was verified.

    Args:
        checkpoint: The checkpoint.
        out: The output directory; it must not exist.
        overrides: As for :func:`export_model`.
        command: The command line that an error tells the user to repeat with further overrides.
        tell: Receives the lines that describe the opened run, such as its platform, one by one.

    Raises:
        AnytronError: The checkpoint would run code, or the run cannot be set up here.
    """
    config = checkpoint_config(checkpoint)
    _refuse_code(config, overrides, command)
    with ScratchDirectory("export", error_console()) as scratch:
        yaml = scratch.path / "run.yaml"
        yaml.write_text(to_yaml(config), encoding="utf-8")
        own = [*alone(config), *_POLICY_ALONE, override("trainer.output_dir", scratch.path)]
        if config.model.lora is not None:
            own.append("model.lora.path=null")  # what the run's adapters began as
        run = open_run(yaml, [*own, *overrides], relative_to=Path.cwd())
        for line in run.lines:
            tell(line)
        refuse(run.diagnostics)
        executor_class = load_component(EXECUTORS, run.config.executor.kind, "executor.kind")

        from anytron.run.trainer.models import export_checkpoint

        with executor_class(run.config, run.session) as executor:
            beginning = checkpoint.state().beginning
            export_checkpoint(run.config, executor, checkpoint.training, out.absolute(), beginning)


def checkpoint_config(checkpoint: Checkpoint) -> RunConfig:
    """The configuration of the run that wrote a checkpoint.

    Raises:
        CheckpointError: The checkpoint's state is damaged, or this version of Anytron refuses its configuration.
    """
    try:
        return RunConfig.model_validate(checkpoint.state().config)
    except ValidationError as error:
        raise CheckpointError(
            "The configuration in the checkpoint cannot be used.",
            where=str(checkpoint.path),
            why=str(error),
            fix="use the version of Anytron that wrote the checkpoint",
        ) from error


def _refuse_code(config: RunConfig, overrides: Sequence[str], command: str) -> None:
    """A checkpoint is data, whoever wrote it: a function in its configuration runs only if the user names it too."""
    for key, reference in (("model.tokenizer", config.model.tokenizer), ("model.processor", config.model.processor)):
        named = any(one.startswith(f"{key}=") for one in overrides)
        if reference is not None and ":" in reference and not named:
            raise ConfigError(
                "Anytron does not run a function that only a checkpoint names.",
                where=f"{key} = {reference}",
                why="the function is code that the author of the checkpoint has chosen",
                fix=f"if you trust the function, set it yourself: {command} {key}={reference}",
            )


def run_replay(path: Path, overrides: Sequence[str], *, checkpoint: Path | None, as_json: bool) -> bool:
    """Replay a saved mini-batch, print what was found, and say whether every number was finite.

    Args:
        path: A directory below ``bad_batches/``.
        overrides: Keys of the run's configuration to change, for example ``model.dtype=float32``.
        checkpoint: A checkpoint to take the weights from; None = the saved weights, or else the initial model.
        as_json: Print JSON.

    Raises:
        AnytronError: The directory holds no saved mini-batch, or this machine cannot run the update.
    """
    from anytron.run.trainer.non_finite import CONFIG, read_bad_batch, replay

    notes = error_console()
    path = path.resolve()
    update, batch = read_bad_batch(path)
    found = None if checkpoint is None else locate(checkpoint)
    if found is not None:
        found.verify()
    config = load_config(path / CONFIG)
    origin, weights = _weights(path, config, found)
    with ScratchDirectory("replay", notes) as scratch:
        own = [*alone(config), override("trainer.output_dir", scratch.path), *weights]
        run = open_run(path / CONFIG, [*own, *overrides])
        for line in run.lines:
            notes.print(line)
        refuse([*run.diagnostics, *replay_diagnostics(run.config)])
        executor_class = load_component(EXECUTORS, run.config.executor.kind, "executor.kind")
        notes.print(f"replaying step {update.step}, update {update.update} of the {update.model}, from {origin}")
        files = None if found is None else found.training
        with executor_class(run.config, run.session) as executor:
            finding = replay(update, batch, run.config, executor, files)
    print(json.dumps(_record(update, finding, origin), indent=2) if as_json else "\n".join(_lines(finding)))
    return not finding.reproduced


def _weights(path: Path, config: RunConfig, checkpoint: Checkpoint | None) -> tuple[str, list[str]]:
    """Find the weights that the update starts from: a description of them, and overrides that load them."""
    from anytron.run.trainer.models import model_directory

    made = config.model.path is None
    initial = [override("model.path", model_directory(config)), "model.config=null"] if made else []
    if checkpoint is not None:
        return f"the checkpoint of step {checkpoint.step}", initial
    if (path / "critic").is_dir():
        return "its weights at that time", [*initial, override("critic.path", path / "critic")]
    if (path / "adapter").is_dir():
        return "its adapters at that time", [*initial, override("model.lora.path", path / "adapter")]
    if (path / "model").is_dir():
        tokenizer = [] if config.model.tokenizer else [override("model.tokenizer", config.model.path)]
        return "its weights at that time", [override("model.path", path / "model"), "model.config=null", *tokenizer]
    if not model_directory(config).is_dir():
        raise DataError(
            "The run's initial model does not exist.",
            where=str(model_directory(config)),
            fix=f"start from a checkpoint of the run: anytron replay {path} --checkpoint PATH",
        )
    return "the initial model", initial


def _lines(finding: ReplayResult) -> list[str]:
    inspection = finding.inspection
    lines = [f"in the saved batch: {field}" for field in finding.data]
    lines += [f"in the weights: {name}" for name in inspection.weights]
    first = inspection.first
    if first is None:
        return [*lines, "in the passes: every number is finite"]
    lines.append(f"first in the passes: {first.value} in the {_where(first)}, {first.count} of {first.size} numbers")
    if finding.sequence is None:
        return [*lines, f"  micro-batch {first.micro_batch}"]
    place = f"sequence {finding.sequence} of the mini-batch, token {first.token} (id {finding.token_id})"
    return [*lines, f"  micro-batch {first.micro_batch}, {place}"]


def _where(first: NonFinite) -> str:
    if first.what == "loss":
        return "loss"
    if first.what in ("output", "gradient"):
        return f"{first.what} of {first.place}"
    return first.what.replace("its", f"{first.place}'s")


def _record(update: BadUpdate, finding: ReplayResult, origin: str) -> dict[str, Any]:
    """Return the object that ``--json`` prints."""
    return {"update": asdict(update), "from": origin, **asdict(finding)}
