"""Check the environment that a configuration names, before anything starts, and start its processes."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from anytron.config.imports import resolve
from anytron.environments.pool import EnvironmentPool
from anytron.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from anytron.config.generation import EnvironmentSection
    from anytron.config.schema import RunConfig

KEY = "environment.path"


def check_environment(section: EnvironmentSection) -> None:
    """Check that the class is one of environments, and can be made with its options.

    Raises:
        ConfigError: It does not exist, lacks a method, or does not take its options.
    """
    made = resolve(section.path, key=KEY)
    wanted = {"reset": "task", "step": "turn"}
    for method, argument in wanted.items() if inspect.isclass(made) else ():
        function = getattr(made, method, None)
        if not callable(function) or not _takes(function, "self", argument):
            raise ConfigError(
                f"{section.path} is no environment.",
                where=KEY,
                why=f"it has no method {method}(self, {argument})",
                fix="docs/how-to/use-tools-and-environments.md shows what an environment has",
            )
    try:
        signature = inspect.signature(made)
    except ValueError:
        return  # classes written in C may have no signature; the first call tells
    try:
        signature.bind(**section.options)
    except TypeError as error:
        raise ConfigError(
            "An environment cannot be made with its options.",
            where="environment.options",
            why=f"{error}; {section.path} takes {signature}",
            fix="the options are its keyword arguments",
        ) from error


def start_environments(config: RunConfig, logs: Path) -> AbstractContextManager[EnvironmentPool | None]:
    """Start the processes of a run's environments, without waiting for them; None for a run without."""
    if config.environment is None:
        return nullcontext()
    return EnvironmentPool(config.environment, logs, config.executor.start_timeout_s)


def _takes(function: object, *arguments: str) -> bool:
    try:
        inspect.signature(function).bind(*arguments)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True
