"""``anytron checkpoint export``: one rank of the training engine loads a checkpoint and writes the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from anytron.base.components import EXECUTORS, load_component
from anytron.base.errors import CheckpointError, ConfigError
from anytron.cli.alone import alone, override
from anytron.cli.output import error_console
from anytron.cli.scratch import ScratchDirectory
from anytron.config.diagnostics import refuse
from anytron.config.dump import to_yaml
from anytron.config.schema import RunConfig
from anytron.record.checkpoint.directory import locate
from anytron.run.preflight.open_run import open_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.record.checkpoint.directory import Checkpoint

POLICY_ALONE = ("algorithm={}", "critic=null", "teacher=null")
"""Neither a critic nor a reference model nor a teacher is loaded."""


def export_model(path: Path, out: Path, overrides: Sequence[str]) -> None:
    """Write the model of a checkpoint.

    Args:
        path: A checkpoint; or a directory of checkpoints or of a run, whose newest one is taken.
        out: The directory to write.
        overrides: Changes of the run's configuration, for example where its model lies now; relative paths are relative
            to the current directory.

    Raises:
        AnytronError: The checkpoint is damaged or would run code, ``out`` exists, or the run cannot be set up here.
    """
    if out.exists():
        raise ConfigError("The directory to write exists.", where=str(out), fix="name another one")
    checkpoint = locate(path)
    checkpoint.verify()
    config = _config(checkpoint)
    _refuse_code(config, overrides)
    notes = error_console()
    with ScratchDirectory("export", notes) as scratch:
        yaml = scratch.path / "run.yaml"
        yaml.write_text(to_yaml(config), encoding="utf-8")
        own = [*alone(config), *POLICY_ALONE, override("trainer.output_dir", scratch.path)]
        if config.model.lora is not None:
            own.append("model.lora.path=null")  # what the run's adapters began as
        run = open_run(yaml, [*own, *overrides], relative_to=Path.cwd())
        for line in run.lines:
            notes.print(line)
        refuse(run.diagnostics)
        executor_class = load_component(EXECUTORS, run.config.executor.kind, "executor.kind")

        from anytron.run.trainer.trained_models import export_checkpoint

        with executor_class(run.config, run.session) as executor:
            beginning = checkpoint.state().beginning
            export_checkpoint(run.config, executor, checkpoint.training, out.absolute(), beginning)
    notes.print(f"the model after step {checkpoint.step}: {out}")


def _config(checkpoint: Checkpoint) -> RunConfig:
    """The configuration of the run that a checkpoint is of."""
    try:
        return RunConfig.model_validate(checkpoint.state().config)
    except ValidationError as error:
        raise CheckpointError(
            "The configuration in the checkpoint cannot be used.",
            where=str(checkpoint.path),
            why=str(error),
            fix="use the version of Anytron that wrote it",
        ) from error


def _refuse_code(config: RunConfig, overrides: Sequence[str]) -> None:
    """A checkpoint is data, whoever wrote it: a function in its configuration runs only if the user names it too."""
    for key, reference in (("model.tokenizer", config.model.tokenizer), ("model.processor", config.model.processor)):
        named = any(override.startswith(f"{key}=") for override in overrides)
        if reference is not None and ":" in reference and not named:
            raise ConfigError(
                "The checkpoint's configuration names a function, and nothing in a checkpoint runs unasked.",
                where=f"{key} = {reference}",
                fix=f"if you trust it, name it yourself: anytron checkpoint export PATH OUT {key}={reference}",
            )
