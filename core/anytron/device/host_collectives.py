"""Collectives for a device without its own: copies to host memory, gloo, and copies back."""

from __future__ import annotations

from anytron.base.errors import PlatformError


def host_collectives(device_type: str) -> str:
    """Register collectives over host memory for a device, and return the name of their backend.

    Tensors are copied to host memory, gloo runs the collective, and the results are copied back. Use this until the
    device has its own collectives: ``communication_backend = host_collectives("acme")`` in the runtime. Collectives and
    point-to-point messages of ``torch.distributed`` work. Device meshes and functional collectives (Megatron-FSDP) do
    not work: they need a group with a name and a backend for each device type.

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
        missing = "gloo" if distributed.is_available() else "support for distributed training"
        raise PlatformError(
            "Collectives over host memory cannot be used.",
            where=f"host_collectives('{device_type}')",
            why=f"torch was built without {missing}",
            fix="install a torch that has gloo, or name the device's own backend in communication_backend",
        )
    from anytron.device.host_process_group import BACKEND, make_process_group

    registered: list[str] = distributed.Backend.backend_capability.get(BACKEND, [])
    if not registered:
        distributed.Backend.register_backend(BACKEND, make_process_group, devices=[device_type])
    elif registered != [device_type]:
        raise PlatformError(
            f"Collectives over host memory are already registered for another device type, {registered[0]}.",
            where=f"host_collectives('{device_type}')",
            why="a process can register them for one device type only",
            fix=f"start another process for the device type {device_type}",
        )
    return BACKEND
