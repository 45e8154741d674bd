"""Drop one warning of Megatron's RNG tracker where it is wrong."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from anytron.device.patches import Installed

if TYPE_CHECKING:
    from anytron.device.hooks.types import PatchContext

LOGGER = "megatron.core.tensor_parallel.random"
MESSAGE = "CPU RNG state changed within GPU RNG context"


def drop_warning(context: PatchContext) -> Installed:
    """Filter the message if the device draws from the host's generator.

    The tracker forks the device's generator and warns if the host's state has changed meanwhile. Where both are
    one object it always changes, and the fork restores it.
    """
    import torch

    if context.platform.runtime().default_generator() is not torch.default_generator:
        return Installed(lambda: None, "not needed: the device has its own generator")
    logger = logging.getLogger(LOGGER)

    def keep(record: logging.LogRecord) -> bool:
        return record.msg != MESSAGE

    logger.addFilter(keep)
    return Installed(lambda: logger.removeFilter(keep))
