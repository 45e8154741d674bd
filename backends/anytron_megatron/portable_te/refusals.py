"""Refuse features of Transformer Engine that this package does not compute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from anytron.base.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping


MEANT = ("bottom_right_diagonal",)
"""Settings whose value False asks for something."""


def refuse(where: str, what: str, fix: str) -> NoReturn:
    """Raise the error for one unsupported feature.

    Raises:
        EngineError: Always.
    """
    raise EngineError(
        f"The portable Transformer Engine has no {what}.",
        where=f"transformer_engine.pytorch, {where}",
        why="it is written in plain torch, and supports only what docs/reference/portable-te.md lists",
        fix=fix,
    )


def refuse_settings(where: str, settings: Mapping[str, Any]) -> None:
    """Refuse settings that ask for a feature: those that are neither None nor False, or are in :data:`MEANT`.

    Raises:
        EngineError: At least one setting is set; the message names all of them.
    """
    asked = {
        name: value for name, value in settings.items() if value is not None and (value is not False or name in MEANT)
    }
    if asked:
        what = ", ".join(f"{name}={value!r}" for name, value in asked.items())
        refuse(where, f"support for {what}", "do not pass these settings")
