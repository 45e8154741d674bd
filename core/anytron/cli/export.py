"""``anytron checkpoint export``: one rank of the training engine loads a checkpoint and writes the model."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from anytron.checkpoint.directory import locate
from anytron.components import EXECUTORS, find_component
from anytron.config.diagnostics import refuse
from anytron.config.dump import to_yaml
from anytron.config.schema import ParallelSection, RunConfig
from anytron.errors import ConfigError
from anytron.preflight.open_run import open_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.checkpoint.directory import Checkpoint

ALONE = ("executor.kind=local", "algorithm.kl_coefficient=0", "resume=never", "checkpoint={}")
"""One process on this machine, without a reference model."""


def export_model(path: Path, out: Path, overrides: Sequence[str]) -> None:
    """Write the model of a checkpoint.

    Args:
        path: A checkpoint; or a directory of checkpoints or of a run, whose newest one is taken.
        out: The directory to write.
        overrides: Changes of the run's configuration, for example where its model lies now.

    Raises:
        AnytronError: The checkpoint is damaged, ``out`` exists, or the run cannot be set up here.
    """
    if out.exists():
        raise ConfigError("The directory to write exists.", where=str(out), fix="name another one")
    checkpoint = locate(path)
    checkpoint.verify()
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="anytron-export-") as directory:
        yaml = Path(directory) / "run.yaml"
        yaml.write_text(to_yaml(_alone(checkpoint)), encoding="utf-8")
        run = open_run(yaml, [*ALONE, f"trainer.output_dir={directory}", *overrides])
        for line in run.lines:
            notes.print(line, markup=False)
        refuse(run.diagnostics)
        executor_class = find_component(EXECUTORS, run.config.executor.kind, "executor.kind").load()

        from anytron.trainer.export import export_checkpoint

        with executor_class(run.config, run.session) as executor:
            export_checkpoint(run.config, executor, checkpoint.training, out.absolute())
    notes.print(f"the model after step {checkpoint.step}: {out}", markup=False)


def _alone(checkpoint: Checkpoint) -> RunConfig:
    """The run's configuration for one rank."""
    config = RunConfig.model_validate(checkpoint.state().config)
    options = {key: value for key, value in config.engine.options.items() if not key.startswith("virtual_pipeline")}
    engine = config.engine.model_copy(update={"options": options})
    return config.model_copy(update={"parallel": ParallelSection(), "engine": engine})
