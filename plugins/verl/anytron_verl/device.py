"""Anytron's platform with verl's device interface."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from verl.plugin.platform import PlatformBase

from anytron_verl import PLATFORM, ROLLOUT, process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from anytron import DeviceRuntime, Platform

ENGINES = "verl.workers.engine"
"""The package in which verl's engines register themselves."""
ROLLOUTS = "verl.workers.rollout.replica"
"""The module in which verl's rollouts are registered."""


class AnytronDevice(PlatformBase):  # type: ignore[misc]  # verl may be absent where types are checked
    """The device stack's platform for verl: ``torch.cuda`` if that is redirected, else the device's own module.

    Processes without a device use only names and Ray's resource, which need no device.
    """

    @property
    def _platform(self) -> Platform:
        return process.stack().platform

    @property
    def _runtime(self) -> DeviceRuntime:
        return self._platform.runtime()

    @property
    def device_name(self) -> str:
        """The device type, ``cuda`` if ``torch.cuda`` is redirected; verl makes device names from it."""
        return "cuda" if self._platform.redirects_torch_cuda else self._runtime.device_type

    @property
    def vendor_name(self) -> str:
        """The name ``anytron``. verl reads it first when it chooses an engine, so this registers the engines.

        Importing verl's engines takes seconds, which processes without an engine save.
        """
        if ENGINES in sys.modules:
            from anytron_verl import engines

            engines.register(self.device_name)
        _register_rollout()
        return PLATFORM

    @property
    def device_module(self) -> ModuleType:
        """The module of torch that has the device's functions."""
        module: ModuleType = torch.get_device_module(self.device_name)
        return module

    def is_available(self) -> bool:
        """Return True: the device stack opens only on a platform that can be used."""
        return True

    def current_device(self) -> int:
        """Index of the current device."""
        return self._runtime.current_device().index or 0

    def device_count(self) -> int:
        """Devices that this process can use."""
        return self._runtime.device_count()

    def set_device(self, device_index: int) -> None:
        """Make a device the current one."""
        self._runtime.set_device(device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for the current device; ``device_index`` is ignored, because a process uses one device."""
        del device_index
        self._runtime.synchronize()

    def manual_seed(self, seed: int) -> None:
        """Seed the device's generator."""
        self._runtime.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the device's generator; a process uses one device."""
        self._runtime.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing: the platform's options set the allocator when a process starts."""

    def empty_cache(self) -> None:
        """Return cached memory to the device."""
        self._runtime.empty_cache()

    def get_device_capability(self, device_index: int = 0) -> tuple[int, int]:
        """(major, minor); (0, 0) on devices without compute capabilities."""
        del device_index
        return self._runtime.compute_capability()

    def communication_backend_name(self) -> str:
        """The backend of ``torch.distributed``."""
        return self._runtime.communication_backend

    def visible_devices_envvar(self) -> str:
        """The variable that lists the visible devices; if the platform has none, CUDA's, which is then not read."""
        return self._platform.visible_devices_variable or "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """Mark a range in the device's profiler."""
        with self._runtime.profiler_range(msg):
            yield

    def profiler_start(self) -> None:
        """Do nothing: torch's profiler needs no switch."""

    def profiler_stop(self) -> None:
        """Do nothing, as :meth:`profiler_start`."""

    def ray_resource_name(self) -> str:
        """The platform's resource; ``GPU`` if it has none, because verl requires ``GPU`` or ``NPU`` before it starts.

        The process that starts replicas calls this method before it looks up the class of replicas, so this method
        registers the class.
        """
        _register_rollout()
        return self._platform.ray_resource or "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """The variable that keeps Ray from setting the list of visible devices."""
        return [f"RAY_EXPERIMENTAL_NOSET_{self.visible_devices_envvar()}"]

    def is_ipc_supported(self) -> bool:
        """Return False: weights are sent to the rollout through shared host memory, which every platform has."""
        return False

    def cudart(self) -> Any:
        """Return None: there is no CUDA runtime to call directly."""
        return None


def _register_rollout() -> None:
    """Register the rollout in verl's two registries, of replicas and of their adapters in training workers, once.

    Does nothing before verl's own rollouts are imported, because importing them takes seconds. The code of this rollout
    is not imported.
    """
    if ROLLOUTS not in sys.modules:
        return
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    if (ROLLOUT, "async") not in _ROLLOUT_REGISTRY:
        _ROLLOUT_REGISTRY[ROLLOUT, "async"] = "anytron_verl.rollout.adapter.ServerAdapter"
        process.at_stop(_ROLLOUT_REGISTRY.pop, (ROLLOUT, "async"), None)
        RolloutReplicaRegistry.register(ROLLOUT, _replica)
        process.at_stop(RolloutReplicaRegistry._registry.pop, ROLLOUT, None)


def _replica() -> type[Any]:
    from anytron_verl.rollout.server import TransformersReplica

    return TransformersReplica
