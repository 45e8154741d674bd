"""``anytron plugins``: show which plugins are installed, which are active, and why."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from anytron.device.loading import Survey

app = typer.Typer(no_args_is_help=True, help="Show installed plugins: hardware platforms and extensions.")


@app.callback()
def _group() -> None:
    """Show installed plugins: hardware platforms and extensions."""


@app.command("list")
def list_command(
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
    its device. ANYTRON_PLUGINS=a,b loads only those plugins beside the embedded ones;
    ANYTRON_DISABLE_PLUGINS=a,b leaves some out; ANYTRON_TRACE_HOOKS=1 prints every hook call.

    The exit status is 1 if a plugin is broken, a duplicate, or written for another version of the
    contract: runs refuse it. A platform whose device is absent is not an error. Nor is a missing package
    that a plugin needs: it is listed, and `anytron doctor` tells whether a run could start.
    """
    from anytron.device.loading import survey_plugins

    survey = survey_plugins()
    if as_json:
        typer.echo(json.dumps([report.as_json() for report in survey.reports], indent=2))
    else:
        _print_table(survey)
    if survey.error is not None:
        typer.echo(f"No platform is active. {survey.error}", err=True)
    if any(report.refused for report in survey.reports):
        raise typer.Exit(1)


def _print_table(survey: Survey) -> None:
    from rich.table import Table
    from rich.text import Text

    from anytron.cli.tables import print_table

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
