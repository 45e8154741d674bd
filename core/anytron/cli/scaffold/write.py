"""Write the package of a new platform."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from anytron.base.errors import PluginError
from anytron.base.files import exhausted, publish_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.cli.scaffold.names import Names

TEMPLATE = Path(__file__).parent / "template"


def write_package(names: Names, into: Path) -> Path:
    """Write ``into/anytron-NAME``: whole, or not at all.

    Returns:
        The directory.

    Raises:
        PluginError: It is there already, or ``into`` is no directory in which it can be made.
    """
    directory = into / names.distribution
    if directory.exists() or directory.is_symlink():
        raise PluginError(
            f"{directory} exists already.",
            where="anytron new-platform",
            why="nothing is overwritten",
            fix="remove it, or write elsewhere with --into DIR",
        )

    def write(part: Path) -> None:
        for source in template_files():
            file = part / names.fill(source.relative_to(TEMPLATE).as_posix())
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(names.fill(source.read_text(encoding="utf-8")), encoding="utf-8")

    try:
        publish_directory(directory, write)
    except OSError as error:
        raise exhausted(error) or PluginError(
            f"{directory} cannot be written.",
            where="anytron new-platform",
            why=f"{error.strerror}: {error.filename}",
            fix="write elsewhere with --into DIR",
        ) from error
    return directory


def template_files() -> Iterator[Path]:
    """The files of the template; not what Python leaves beside them."""
    for path in sorted(TEMPLATE.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path
