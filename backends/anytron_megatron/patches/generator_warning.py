"""Drop one message of Megatron's RNG tracker where it cannot be true."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from anytron.platform import DeviceRuntime

LOGGER = "megatron.core.tensor_parallel.random"
MESSAGE = "CPU RNG state changed within GPU RNG context"


def install(runtime: DeviceRuntime) -> Callable[[], None]:
    """Filter the message if the device draws from the host's generator; return the undo function.

    The tracker forks the device's generator and warns if the host's moved meanwhile. Where both are
    one object it always moves, and the fork restores it.
    """
    import torch

    if runtime.default_generator() is not torch.default_generator:
        return lambda: None
    logger = logging.getLogger(LOGGER)

    def keep(record: logging.LogRecord) -> bool:
        return record.msg != MESSAGE

    logger.addFilter(keep)
    return lambda: logger.removeFilter(keep)
