"""Tables for people: as wide as their terminal, and wide enough to read in files and logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

FILE_WIDTH = 200
"""Columns where the output is not a terminal: rich would take 80 and cut names short."""


def print_table(table: Table) -> None:
    """Print a table on the standard output."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=FILE_WIDTH)
    console.print(table)
