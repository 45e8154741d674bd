"""Which versions a run is made of."""

from __future__ import annotations

import contextlib
import platform as machine
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from anytron.base.components import ROLLOUT_ENGINES, TRAINING_ENGINES, engine_info

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.config.schema import RunConfig

OF_EVERY_RUN = ("anytron", "torch", "transformers")
"""Distributions of which every run is made, whatever its engines."""


def installed_versions(config: RunConfig) -> dict[str, str]:
    """Give the versions of Python, of what every run is made of, and of the components of a run's engines.

    Those of this process: a rollout engine that has a Python of its own says its own (``patches.json``). What is not
    installed is left out.
    """
    found = {"python": machine.python_version()}
    for distribution in dict.fromkeys(_distributions(config)):
        with contextlib.suppress(PackageNotFoundError):
            found[distribution] = version(distribution)
    return found


def _distributions(config: RunConfig) -> Iterator[str]:
    yield from OF_EVERY_RUN
    engines = [(TRAINING_ENGINES, config.engine.name, "engine.name")]
    if config.rollout.python is None:
        engines.append((ROLLOUT_ENGINES, config.rollout.engine, "rollout.engine"))
    for group, name, key in engines:
        yield from (component.distribution for component in engine_info(group, name, key).components)
