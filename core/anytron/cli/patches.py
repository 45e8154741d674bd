"""``anytron patches``: show which third-party code a run on this machine would change, and why."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

if TYPE_CHECKING:
    from anytron.device.hooks.types import Role

app = typer.Typer(no_args_is_help=True, help="Show the patches of third-party code.")


@app.callback()
def _group() -> None:
    """Show the patches of third-party code."""


@app.command("list")
def list_command(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list with one object for each patch and target.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also list the patches of processes that generate, and of the driver.")
    ] = False,
    engine: Annotated[
        str | None, typer.Option(help="Name of the training engine; default: the default of engine.name.")
    ] = None,
) -> None:
    """List the patches of a training process, with a verdict by the installed versions.

    The verdict is `applies`, `skipped` (the installed version does not have the fault), `superseded` (a class
    that inherits from the target defines its own version), or `target missing` (the installed version has no such
    module or attribute). This imports and changes nothing. A run writes what it really did to its patches.json.
    """
    from anytron.base.components import TRAINING_ENGINES, find_component
    from anytron.device.hooks.types import Role
    from anytron.device.loading import open_session
    from anytron.run.preflight.planned_patches import planned_patches

    if engine is not None:
        find_component(TRAINING_ENGINES, engine, "--engine")
    session = open_session(engine=engine)
    roles: tuple[Role, ...] = get_args(Role) if everything else ("trainer",)
    rows = planned_patches(session, roles, engine)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        typer.echo(f"platform: {session.platform.name} ({session.choice_reason})")
        _print_table(rows)


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from anytron.cli.tables import print_table

    colours = {"applies": "green", "superseded": "cyan", "skipped": "dim", "target missing": "red"}
    table = Table(box=None, pad_edge=False)
    for heading in ("verdict", "id"):
        table.add_column(heading, no_wrap=True)
    for heading in ("owner", "phase"):
        table.add_column(heading)
    for heading in ("target", "why"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(
            Text(row["verdict"], style=colours[row["verdict"]]),
            row["id"],
            row["owner"],
            row["phase"],
            Text(row["target"]),
            Text(f"{row['reason']}\n{row['purpose']}"),
        )
    print_table(table)
