"""``anytron train`` and ``anytron config show``: open a run, or each stage of one; then train it, or print it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from anytron.base.components import EXECUTORS, load_component
from anytron.base.garbage import no_collections
from anytron.cli.output import run_output
from anytron.cli.progress import make_progress
from anytron.config.diagnostics import refuse
from anytron.config.dump import to_yaml
from anytron.run.groups import all_groups
from anytron.run.preflight.open_run import open_stages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rich.console import Console

    from anytron.config.schema import RunConfig
    from anytron.device.loading import Session
    from anytron.run.trainer.frame import RunSummary


CONTINUE = "the same command with resume=auto continues the run"
"""What the user can do after a run that ended before its last step."""


def run_training(path: Path, overrides: Sequence[str]) -> None:
    """Train as the configuration says; the first line of output is the platform and why it was chosen.

    Raises:
        AnytronError: The run failed; no process is left.
    """
    with run_output() as console:
        _train(path, overrides, console)


def _train(path: Path, overrides: Sequence[str], console: Console) -> None:
    stages = open_stages(path, overrides)
    for line in dict.fromkeys(line for run in stages.values() for line in run.lines):
        console.print(line)
    refuse(dict.fromkeys(one for run in stages.values() for one in run.diagnostics))

    session = next(iter(stages.values())).session
    if "" in stages:
        _train_run(stages[""].config, session, console)
        return

    import torch

    from anytron.run.trainer.stages import remaining_stages

    torch.set_num_threads(1)
    configs = {name: run.config for name, run in stages.items()}
    for name, config in remaining_stages(configs, console.print):
        console.print(f"stage {name}")
        if _train_run(config, session, console).stopped_by is not None:
            return


def _train_run(config: RunConfig, session: Session, console: Console) -> RunSummary:
    executor_class = load_component(EXECUTORS, config.executor.kind, "executor.kind")
    ranks = config.parallel.world_size
    generating = "" if config.supervised else f"generating with {config.rollout.engine}; "
    console.print(
        f"training on {ranks} rank{'s' if ranks > 1 else ''} ({config.engine.name}), "
        f"{generating}files go to {config.trainer.output_dir}"
    )
    with (
        executor_class(config, session) as executor,
        make_progress(console, shown=config.tracking.progress) as progress,
    ):
        executor.warm_up(all_groups(config))  # first: the processes take seconds, as the next imports do here

        with no_collections():
            import torch

            from anytron.run.trainer.loop import train

        # The driver's tensors are small, and threads of its own would spin on the processors where workers compute.
        torch.set_num_threads(1)
        summary = train(config, executor, progress)
    for line in last_words(summary, supervised=config.supervised):
        console.print(line)
    return summary


def last_words(summary: RunSummary, *, supervised: bool) -> Iterator[str]:
    """Yield the lines that say how a run ended.

    Args:
        summary: Summary of the run; if no step was done, it has no reward and no loss.
        supervised: The run has a loss and no reward.
    """
    name, metric = ("loss", "loss/nll") if supervised else ("reward", "reward/mean")
    if summary.early_stop is not None:
        yield summary.early_stop
    if summary.stopped_by is not None:
        saved = f"{summary.steps} steps are done" if summary.steps else "no step was done"
        yield f"stopped by {summary.stopped_by}: {saved}; {CONTINUE}"
    elif metric in summary.metrics:
        yield (
            f"{summary.steps} step{'s' if summary.steps > 1 else ''}, {summary.seconds:.1f} s, "
            f"last {name} {summary.metrics[metric]:.3f}; see {summary.output_dir}"
        )


def show_config(path: Path, overrides: Sequence[str]) -> None:
    """Print the configuration of each stage as YAML, and print to stderr what plugins changed and why.

    Raises:
        ConfigError: A run with this configuration would be refused; the configuration is printed all the same.
    """
    stages = open_stages(path, overrides)
    for line in dict.fromkeys(line for run in stages.values() for line in run.lines):
        typer.echo(line, err=True)
    for name, run in stages.items():
        if name:
            typer.echo(f"--- # stage {name}")
        typer.echo(to_yaml(run.config), nl=False)
    refuse(dict.fromkeys(one for run in stages.values() for one in run.diagnostics))
