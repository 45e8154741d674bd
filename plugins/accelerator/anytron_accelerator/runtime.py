"""The runtime of the device that torch reports."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import ClassVar

import torch
from torch import distributed

from anytron import AcceleratorRuntime, PlatformError, host_collectives
from anytron_accelerator.detection import GROUP


class TorchRuntime(AcceleratorRuntime):
    """A device that ``torch.accelerator`` reports; :func:`make_runtime` sets the type and the backend."""

    backend_reason: ClassVar[str]
    """Why collectives use :attr:`communication_backend`. No full stop."""


def make_runtime() -> TorchRuntime:
    """Load the packages that add devices to torch, and make the runtime of the device that torch then reports.

    Raises:
        PlatformError: A package cannot be loaded, or torch reports no accelerator.
    """
    for point in entry_points(group=GROUP):
        _load(point)
    found = torch.accelerator.current_accelerator()
    if found is None:
        raise PlatformError(
            "torch reports no accelerator in this process.",
            why="torch.accelerator.current_accelerator() returned None",
            fix="install the package that adds your device to torch, or set platform.name=cpu",
        )
    try:
        backend = distributed.get_default_backend_for_device(found.type)
        reason = f"the default of torch.distributed for {found.type}"
    except ValueError:
        backend = host_collectives(found.type)
        reason = f"torch.distributed has no backend for {found.type}, so that tensors go through host memory and gloo"

    kind = found.type

    class Runtime(TorchRuntime):
        device_type: ClassVar[str] = kind
        communication_backend: ClassVar[str] = backend
        backend_reason: ClassVar[str] = reason

    return Runtime()


def _load(point: EntryPoint) -> None:
    """Load a package that adds a device to torch.

    Raises:
        PlatformError: The package raises an error.
    """
    try:
        point.load()()
    except Exception as error:
        raise PlatformError(
            f"The package {point.module.partition('.')[0]}, which adds a device to torch, cannot be loaded.",
            where=f"entry point {point.name} of the group {GROUP}",
            why=f"{type(error).__name__}: {error}",
            fix="repair or uninstall the package; the driver of its device may be missing",
        ) from error
