"""``anytron config show``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from anytron.config.diagnostics import refuse
from anytron.config.dump import to_yaml
from anytron.run.preflight.open_run import open_stages

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def show_config(path: Path, overrides: Sequence[str]) -> None:
    """Print the configuration as YAML, of each stage by itself, and to the error output what plugins changed and why.

    Raises:
        ConfigError: The run could not start; the configuration is printed all the same.
    """
    stages = open_stages(path, overrides)
    for line in dict.fromkeys(line for run in stages.values() for line in run.lines):
        typer.echo(line, err=True)
    for name, run in stages.items():
        if name:
            typer.echo(f"--- # stage {name}")
        typer.echo(to_yaml(run.config), nl=False)
    refuse(dict.fromkeys(one for run in stages.values() for one in run.diagnostics))
