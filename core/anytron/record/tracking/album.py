"""Save small copies of the pictures in logged samples' prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.task.data.vision import read_picture

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from anytron.task.data.vision import Picture

LONGEST_SIDE = 512
"""Pixels; larger pictures are scaled down."""


class Album:
    """The pictures of a step, or of a validation after it, in ``images/`` of a run's directory.

    A picture of several samples is saved once.

    Args:
        directory: Of the run.
        step: The step, part of the files' names.
        validation: The set's name, which is another part; None = training's samples.
    """

    def __init__(self, directory: Path, step: int, validation: str | None = None) -> None:
        self._directory = directory
        self._begin = f"{step:05d}" if validation is None else f"{step:05d}-{validation}"
        self._names: dict[int, str] = {}

    def add(self, pictures: Sequence[Picture]) -> list[str]:
        """Save pictures, and return their paths relative to the run's directory."""
        return [self._add(picture) for picture in pictures]

    def _add(self, picture: Picture) -> str:
        if id(picture) not in self._names:
            name = f"images/{self._begin}-{len(self._names)}.png"
            (self._directory / "images").mkdir(exist_ok=True)
            small = read_picture(picture, name)
            small.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
            small.save(self._directory / name)
            self._names[id(picture)] = name
        return self._names[id(picture)]


def remove_pictures(directory: Path, step: int) -> None:
    """Delete the pictures of the steps after ``step``."""
    for file in (directory / "images").glob("*-*.png"):
        number = file.name.partition("-")[0]
        if number.isdigit() and int(number) > step:
            file.unlink()
