"""``anytron config show``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from anytron.config.diagnostics import refuse
from anytron.config.dump import to_yaml
from anytron.preflight.open_run import open_run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def show_config(path: Path, overrides: Sequence[str]) -> None:
    """Print the configuration as YAML, and to the error output what plugins changed and why.

    Raises:
        ConfigError: The run could not start; the configuration is printed all the same.
    """
    run = open_run(path, overrides)
    for line in run.lines:
        typer.echo(line, err=True)
    typer.echo(to_yaml(run.config), nl=False)
    refuse(run.diagnostics)
