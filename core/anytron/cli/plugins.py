"""``anytron plugins`` and ``anytron patches``: list plugins, and changes of third-party code."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

if TYPE_CHECKING:
    from anytron.device.hooks.types import Role
    from anytron.device.loading import Survey


plugins_app = typer.Typer(no_args_is_help=True, help="Show installed plugins: hardware platforms and extensions.")


@plugins_app.callback()
def _plugins_group() -> None:
    """Show installed plugins: hardware platforms and extensions."""


@plugins_app.command("list")
def list_plugins(
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print a JSON list of {name, kind, distribution, version, state, reason, hooks, requirements}.",
        ),
    ] = False,
) -> None:
    """List every installed plugin with its state and the reason for it.

    Exactly one platform is active: the one named by ANYTRON_PLATFORM, else the one whose probe finds
    its device. ANYTRON_PLUGINS=a,b loads only the plugins a and b, besides the ones that
    Anytron itself contains; ANYTRON_DISABLE_PLUGINS=a,b loads all but a and b; ANYTRON_TRACE_HOOKS=1 prints every hook
    call.

    The exit status is 1 if a plugin is broken, a duplicate, or written for another version of the plugin contract: runs
    refuse it. A platform whose device is absent is not an error. Nor is a missing package that a plugin needs: it is
    listed, and `anytron doctor` tells whether a run could start.
    """
    from anytron.device.loading import survey_plugins

    survey = survey_plugins()
    if as_json:
        typer.echo(json.dumps([report.as_json() for report in survey.reports], indent=2))
    else:
        _print_plugins(survey)
    if survey.error is not None:
        typer.echo(f"No platform is active. {survey.error}", err=True)
    if any(report.refused for report in survey.reports):
        raise typer.Exit(1)


def _print_plugins(survey: Survey) -> None:
    from rich.table import Table
    from rich.text import Text

    from anytron.cli.output import print_table

    colours = {"active": "green", "available": "cyan", "unavailable": "dim", "blocked": "dim"}
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "kind", "distribution", "state"):
        table.add_column(heading)
    for heading in ("why", "hooks"):
        table.add_column(heading, overflow="fold")
    for report in survey.reports:
        # Text, not markup: reasons quote brackets, as in anytron[ascend].
        why = f"{report.reason}\nfix: {report.remedy}" if report.remedy else report.reason
        table.add_row(
            report.name,
            report.kind,
            f"{report.distribution} {report.version}",
            Text(report.state.value, style=colours.get(report.state.value, "red")),
            Text(why),
            Text(", ".join(report.hooks) or "-"),
        )
    print_table(table)
    needing = [report for report in survey.reports if report.requirements]
    if needing:
        typer.echo("\npackages that plugins need")
    for report in needing:
        typer.echo(f"  {report.name}")
        for finding in report.requirements:
            typer.echo(f"    {finding.as_line()}")


patches_app = typer.Typer(no_args_is_help=True, help="Show the patches of third-party code.")


@patches_app.callback()
def _patches_group() -> None:
    """Show the patches of third-party code."""


@patches_app.command("list")
def list_patches(
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
    from anytron.device.stack import planned_patches

    if engine is not None:
        find_component(TRAINING_ENGINES, engine, "--engine")
    session = open_session(engine=engine)
    roles: tuple[Role, ...] = get_args(Role) if everything else ("trainer",)
    rows = planned_patches(session, roles, engine)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        typer.echo(f"platform: {session.platform.name} ({session.choice_reason})")
        _print_patches(rows)


def _print_patches(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from anytron.cli.output import print_table

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
