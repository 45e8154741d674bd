"""Refuse Python files of model directories, in the one function through which all of transformers gets them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from anytron.base.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable


def refuse_model_code(original: Callable[..., str]) -> Callable[..., NoReturn]:
    """Replace what finds such a file, imports the packages that it names, and copies it to where it is imported."""
    del original

    def get_cached_module_file(directory: Any, module_file: str, *_: Any, **__: Any) -> NoReturn:
        raise EngineError(
            "A model directory wants to run its own code.",
            where=f"{directory}, {module_file}",
            why="Anytron runs no code of a model directory, whatever its files say (SECURITY.md)",
            fix="use a model whose code is in transformers",
        )

    return get_cached_module_file
