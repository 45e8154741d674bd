"""``anytron new-platform``: write the package of a new platform, and say what comes next."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import typer

from anytron.cli.scaffold.names import names_of
from anytron.cli.scaffold.write import write_package

if TYPE_CHECKING:
    from pathlib import Path


def new_platform(name: str, into: Path) -> None:
    """Write the package and print the next commands."""
    names = names_of(name)
    directory = write_package(names, into)
    place = directory if directory.is_absolute() else f"./{directory}"  # without ./ pip would ask its index
    commands = {
        f"pip install --editable {shlex.quote(str(place))}": "",
        f"anytron conformance {name} --level device": "passes as it is: on the host's processor",
    }
    typer.echo(f"wrote {place}, the package of the platform '{name}'; next:\n")
    for command, remark in commands.items():
        typer.echo(f"  {command}" + (f"  # {remark}" if remark else ""))
    typer.echo(
        f"\nThen write probe() in {place}/{names.package}/platform.py, the device in runtime.py,"
        "\nand the hooks that platform.py lists at its end. anytron conformance says what is right and what is wrong."
    )
