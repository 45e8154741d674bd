"""Any accelerator that torch knows, as a platform without code of its own."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from anytron import Availability, Decision, Platform, Probe
from anytron_accelerator.detection import Found, device_packages, find_accelerator

if TYPE_CHECKING:
    from anytron import DeviceRuntime

INSTALL = "install the package that adds your device to torch"
REPAIR = "repair the package that adds the device to torch, or its driver; or uninstall the package"


class AcceleratorPlatform(Platform):
    """The platform ``accelerator``: the device that ``torch.accelerator`` reports, with kernels in plain torch.

    It has code for no device in particular: users name it to run on a device that has no platform yet.
    """

    name = "accelerator"
    api_version = 1
    chosen_by_name_only = True

    def __init__(self) -> None:
        self.device_packages = device_packages()

    def probe(self) -> Probe:
        """Ask torch for an accelerator, in a process of its own, which loads the packages that add devices to torch."""
        found = self._found()
        self.redirects_torch_cuda = found.device_type != "cuda"  # torch.cuda is not redirected to itself
        if found.broken:
            return Probe(Availability.BROKEN, found.reason, REPAIR)
        if not found.devices:
            # Where nothing is made for a device, a processor needs no explanation, unless the user named this platform.
            return Probe(Availability.ABSENT, found.reason, INSTALL if self.named or found.expected else "")
        return Probe(Availability.USABLE, found.reason, devices=found.devices)

    def runtime(self) -> DeviceRuntime:
        """The runtime of the accelerator that torch reports."""
        found = self._found()
        return _runtime(found.device_type, found.backend)

    def decisions(self) -> tuple[Decision, ...]:
        """Return the device and the backend of its collectives, with their reasons."""
        found = self._found()
        backend = Decision("collectives", found.backend, f"the default of torch.distributed for {found.device_type}")
        if not found.backend:
            reason = f"torch.distributed has no backend for {found.device_type} that is available"
            backend = Decision("collectives", "gloo, through host memory", reason)
        return (Decision("device", found.device_type, "torch.accelerator.current_accelerator()"), backend)

    def _found(self) -> Found:
        return find_accelerator(named=self.named, covered=self.covered_packages)


@functools.cache
def _runtime(device_type: str, backend: str) -> DeviceRuntime:
    from anytron_accelerator.runtime import make_runtime

    return make_runtime(device_type, backend)
