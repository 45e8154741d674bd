"""The runtime of the device that torch reports."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, ClassVar

import torch

from anytron import AcceleratorRuntime, PlatformError, host_collectives
from anytron_accelerator.detection import GROUP

if TYPE_CHECKING:
    from collections.abc import Callable


def make_runtime(device: str, backend: str) -> AcceleratorRuntime:
    """Load the packages that add devices to torch, and make the runtime of the device.

    Args:
        device: Type of the device that torch reported to the probe.
        backend: Its backend of ``torch.distributed``; empty = collectives go through host memory.

    Raises:
        PlatformError: torch does not report this device in this process.
    """
    failed: list[str] = []
    for point in entry_points(group=GROUP):
        failed += _load(point.module.partition(".")[0], point.load)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or found.type != device:
        raise PlatformError(
            f"torch does not report the accelerator {device} in this process.",
            where="platform.name=accelerator",
            why="; ".join(failed) or f"torch.accelerator reports {found or 'none'}",
            fix="repair the package that adds the device to torch, or its driver, or set platform.name=cpu",
        )
    collectives = backend or host_collectives(device)

    class Runtime(AcceleratorRuntime):
        device_type: ClassVar[str] = device
        communication_backend: ClassVar[str] = collectives

    return Runtime()


def _load(package: str, load: Callable[[], Callable[[], object]]) -> list[str]:
    """Load a package that adds a device to torch; return why it cannot be loaded, in a list that may be empty."""
    try:
        load()()
    except Exception as error:  # noqa: BLE001 - it may add another device than the one that is used
        return [f"{package} cannot be loaded: {type(error).__name__}: {error}"]
    return []
