"""Check the environment that a configuration names, before anything starts, and start its processes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from anytron.config.imports import resolve
from anytron.task.environments.called import ENVIRONMENT_PATH
from anytron.task.environments.pool import EnvironmentPool

if TYPE_CHECKING:
    from pathlib import Path

    from anytron.config.generation import EnvironmentSection
    from anytron.config.schema import RunConfig


def check_environment(section: EnvironmentSection) -> None:
    """Check that the class is one of environments, and can be made with its options.

    Raises:
        ConfigError: It does not exist, lacks a method, or does not take its options.
    """
    resolve(section.path, ENVIRONMENT_PATH, options=section.options)


def start_environments(config: RunConfig, logs: Path) -> AbstractContextManager[EnvironmentPool | None]:
    """Start the processes of a run's environments, without waiting for them; None for a run without."""
    if config.environment is None:
        return nullcontext()
    return EnvironmentPool(config.environment, logs, config.executor.start_timeout_s)
