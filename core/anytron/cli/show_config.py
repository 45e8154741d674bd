"""``anytron config show``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from anytron.config.dump import to_yaml
from anytron.preflight.open_run import prepare_run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def show_config(path: Path, overrides: Sequence[str]) -> None:
    """Print the configuration as YAML, and to the error output what plugins did to it and why."""
    prepared = prepare_run(path, overrides)
    for line in (prepared.platform_line, *prepared.remarks):
        typer.echo(line, err=True)
    typer.echo(to_yaml(prepared.config), nl=False)
