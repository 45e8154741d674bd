"""Collectives of a device that has none: copies to host memory, gloo, and copies back."""

from __future__ import annotations

from anytron.base.errors import PlatformError


def host_collectives(device_type: str) -> str:
    """Register collectives over host memory for a device, and return the name of their backend.

    They serve to run on several devices before the device has collectives of its own: every tensor goes to host memory
    and back. A runtime names them with ``communication_backend = host_collectives("acme")``. Collectives and
    point-to-point messages of ``torch.distributed`` work; device meshes and functional collectives, which need a group
    with a name and a backend for each device type (Megatron-FSDP), do not.

    Args:
        device_type: Type of the device, as in ``torch.device``.

    Returns:
        The name for ``torch.distributed.init_process_group``.

    Raises:
        PlatformError: torch has no support for distributed training or no gloo, or the collectives are registered for
            another device type.
    """
    from torch import distributed

    if not distributed.is_available() or not distributed.is_gloo_available():
        raise PlatformError(
            "Collectives over host memory cannot be used.",
            where=f"host_collectives('{device_type}')",
            why="torch was built without gloo",
            fix="install a torch that has gloo, or name the device's own backend in communication_backend",
        )
    from anytron.device.host_process_group import BACKEND, make_process_group

    registered: list[str] = distributed.Backend.backend_capability.get(BACKEND, [])
    if not registered:
        distributed.Backend.register_backend(BACKEND, make_process_group, devices=[device_type])
    elif registered != [device_type]:
        raise PlatformError(
            f"Collectives over host memory are registered for the device type {registered[0]} already.",
            where=f"host_collectives('{device_type}')",
            why="a process has one device type",
            fix="use one platform in a process",
        )
    return BACKEND
