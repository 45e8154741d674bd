"""Open the device stack when ``import verl`` loads the plugin, and make its platform verl's platform."""

from __future__ import annotations

import logging
import os

from anytron_verl import CHOICE, PLATFORM, process

logger = logging.getLogger(__name__)

RAY_RESOURCES = "RAY_OVERRIDE_RESOURCES"
"""Environment variable that gives the resources of a cluster that Ray starts by itself, in JSON."""
RANKS = '{"GPU": 1024}'
"""verl reserves a GPU or an NPU for each rank. Where the platform has no device that Ray counts, ranks are processes,
whose number is not limited."""


def load() -> None:
    """Open the device stack, and make its platform verl's platform; do nothing if :data:`CHOICE` names another one.

    verl continues without a plugin that fails and logs this at level DEBUG only, so the error is logged here too.

    Raises:
        AnytronError: The device stack cannot be opened in this process.
    """
    chosen = os.environ.get(CHOICE, "").strip().lower()
    if chosen not in ("", PLATFORM):
        logger.info("%s=%s selects another platform: Anytron stays inactive", CHOICE, chosen)
        return
    try:
        stack = process.begin()
        if stack.platform.ray_resource is None and RAY_RESOURCES not in os.environ:
            os.environ[RAY_RESOURCES] = RANKS
            process.at_stop(os.environ.pop, RAY_RESOURCES, None)
        _offer()
    except Exception as error:
        logger.error("Anytron's plugin failed, and verl continues without it. %s", error)  # noqa: TRY400
        process.stop()
        raise


def _offer() -> None:
    from verl.plugin.platform import PlatformRegistry, platform_manager

    from anytron_verl.device import AnytronDevice

    PlatformRegistry.register(platform=PLATFORM)(AnytronDevice)
    process.at_stop(PlatformRegistry._platforms.pop, PLATFORM, None)
    process.at_stop(setattr, platform_manager, "_current_platform", platform_manager._current_platform)
    platform_manager.set_platform(AnytronDevice())
