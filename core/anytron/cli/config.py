"""``anytron config``: look at configurations."""

from __future__ import annotations

import typer

from anytron.cli.arguments import ConfigPath, Overrides  # noqa: TC001 - typer reads the annotations

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Look at configurations.")


@app.command()
def show(config: ConfigPath, overrides: Overrides = None) -> None:
    """Print CONFIG as a run would use it.

    Overrides, defaults and the edits of plugins are applied, and paths are absolute. Those edits, with
    their reasons, and the warnings of plugins go to stderr.
    """
    from anytron.cli.train import show_config

    show_config(config, overrides or [])
