"""``anytron doctor``: print what :mod:`anytron.proof.doctor` finds."""

from __future__ import annotations

import json
from itertools import groupby
from typing import TYPE_CHECKING

import typer

from anytron.cli.tables import print_table
from anytron.proof.doctor.examination import examine

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from anytron.base.entries import Entry

COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


def run_doctor(path: Path | None, overrides: Sequence[str], *, as_json: bool) -> bool:
    """Examine this machine and print the entries, as a JSON list or as a table for each topic.

    Returns:
        Whether nothing failed.
    """
    entries = list(examine(path, overrides))
    if as_json:
        typer.echo(json.dumps([entry.as_json() for entry in entries], indent=2))
    else:
        _print(entries)
    return not any(entry.status == "fail" for entry in entries)


def _print(entries: Sequence[Entry]) -> None:
    from rich.table import Table
    from rich.text import Text

    for topic, members in groupby(entries, key=lambda entry: entry.topic):
        table = Table(
            box=None, pad_edge=False, title=topic, title_justify="left", title_style="bold", show_header=False
        )
        table.add_column("status", no_wrap=True)
        table.add_column("name", no_wrap=True)
        table.add_column("detail", overflow="fold")
        for entry in members:
            # Text, not markup: reasons quote brackets, as in anytron[ray].
            found = Text(entry.detail)
            if entry.fix and entry.status != "ok":
                found.append(f"\nfix: {entry.fix}", style="bold")
            status = Text(entry.status, style=COLOURS[entry.status])
            table.add_row(status, entry.name.removeprefix(f"{topic}."), found)
        print_table(table)
        typer.echo()
    counts = {status: sum(entry.status == status for entry in entries) for status in COLOURS}
    typer.echo(", ".join(f"{count} {status}" for status, count in counts.items()))
    for entry in entries:
        if entry.status == "fail":
            typer.echo(f"fail: {entry.name}: {entry.detail}" + (f"\n  fix: {entry.fix}" if entry.fix else ""))
