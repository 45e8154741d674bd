"""Output for people: tables as wide as their terminal and wide enough to read in files and logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

FILE_WIDTH = 200
"""Columns where the output is not a terminal: rich would take 80 and cut names short."""


def print_table(table: Table) -> None:
    """Print a table on the standard output."""
    from anytron.cli.output import result_console

    result_console(FILE_WIDTH).print(table)


def kernels_line(suppliers: Mapping[str, str]) -> str:
    """Say in one line which plugins supplied which kernels.

    Args:
        suppliers: Plugins by kernel, as :meth:`anytron.device.hooks.facade.Hooks.suppliers` gives them.
    """
    by_plugin: dict[str, list[str]] = {}
    for kernel, plugins in suppliers.items():
        by_plugin.setdefault(plugins, []).append(kernel.removeprefix("fused_kernel ").removesuffix("_kernel"))
    parts = [f"{', '.join(kernels)} from {plugins}" for plugins, kernels in sorted(by_plugin.items())]
    return "kernels: " + ("; ".join(parts) or "the engine's own")
