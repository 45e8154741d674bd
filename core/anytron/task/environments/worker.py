"""An environment process: it makes environments and calls them, for the driver, until the driver is gone.

Importing this module imports no torch; the environments may.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from anytron.task.environments.called import ENVIRONMENT_PATH
from anytron.task.environments.calls import answer
from anytron.task.isolation.worker import calls, enter

if TYPE_CHECKING:
    from anytron.task.environments.protocol import Environment


def main(channel: int, lifeline: int) -> None:
    """Answer the calls that the driver sends.

    Arguments as for :func:`anytron.task.isolation.worker.enter`.
    """
    connection, start = enter(channel, lifeline)

    from anytron.config.imports import resolve

    options = start["options"]
    make = partial(resolve(start["path"], ENVIRONMENT_PATH, options=options), **options)
    environments: dict[int, Environment] = {}
    for call, give in calls(connection, start):
        found = answer(call, environments, make)
        give(found)
        if found.get("failure", {}).get("ends"):
            return
