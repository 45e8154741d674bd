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
from anytron.config.schema import AlgorithmSection, DataSection, ParallelSection, RewardSection, RunConfig
from anytron.errors import ConfigError
from anytron.preflight.open_run import open_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.checkpoint.directory import Checkpoint

ALONE = ("executor.kind=local", "resume=never", "checkpoint={}")
"""One process on this machine that saves no checkpoints of its own."""


def export_model(path: Path, out: Path, overrides: Sequence[str]) -> None:
    """Write the model of a checkpoint.

    Args:
        path: A checkpoint; or a directory of checkpoints or of a run, whose newest one is taken.
        out: The directory to write.
        overrides: Changes of the run's configuration, for example where its model lies now.

    Raises:
        AnytronError: The checkpoint is damaged or would run code, ``out`` exists, or the run cannot be set up here.
    """
    if out.exists():
        raise ConfigError("The directory to write exists.", where=str(out), fix="name another one")
    checkpoint = locate(path)
    checkpoint.verify()
    config = _alone(checkpoint)
    _refuse_code(config, overrides)
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="anytron-export-") as directory:
        yaml = Path(directory) / "run.yaml"
        yaml.write_text(to_yaml(config), encoding="utf-8")
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
    """The run's configuration for one rank, without what only training needs: data, rewards, losses."""
    config = RunConfig.model_validate(checkpoint.state().config)
    options = {key: value for key, value in config.engine.options.items() if not key.startswith("virtual_pipeline")}
    return config.model_copy(
        update={
            "data": DataSection(source="jsonl"),
            "rewards": [RewardSection(function="exact_match")],
            "algorithm": AlgorithmSection(advantage="grpo" if config.critic is None else "gae"),
            "parallel": ParallelSection(),
            "engine": config.engine.model_copy(update={"options": options}),
        }
    )


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
