"""Any accelerator that torch knows, as a platform without code of its own."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from anytron import Availability, Decision, Platform, Probe
from anytron_accelerator.detection import device_packages, find_accelerator

if TYPE_CHECKING:
    from anytron_accelerator.runtime import TorchRuntime


class AcceleratorPlatform(Platform):
    """The platform ``accelerator``: the device that ``torch.accelerator`` reports, with the neutral kernels.

    It names no device. It serves to run on a device before the device has a platform of its own.
    """

    name = "accelerator"
    api_version = 1
    chosen_by_name_only = True

    def __init__(self) -> None:
        self.device_packages = device_packages()

    def probe(self) -> Probe:
        """Ask torch for an accelerator, in a process of its own, which loads the packages that add devices to torch."""
        found = find_accelerator()
        if not found.devices:
            remedy = "install the package that adds your device to torch, or repair it or its driver"
            return Probe(Availability.ABSENT, found.reason, remedy)
        return Probe(Availability.USABLE, found.reason, devices=found.devices)

    def runtime(self) -> TorchRuntime:
        """The runtime of the accelerator that torch reports."""
        return _runtime()

    def decisions(self) -> tuple[Decision, ...]:
        """Return the device and the backend of its collectives, with their reasons."""
        runtime = self.runtime()
        return (
            Decision("device", runtime.device_type, "torch.accelerator.current_accelerator()"),
            Decision("collectives", runtime.communication_backend, runtime.backend_reason),
        )


@functools.cache
def _runtime() -> TorchRuntime:
    from anytron_accelerator.runtime import make_runtime

    return make_runtime()
