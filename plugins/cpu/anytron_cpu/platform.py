"""The CPU as a platform."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from anytron import Availability, PeakFlops, Platform, Probe

if TYPE_CHECKING:
    from anytron import DeviceRuntime


class CpuPlatform(Platform):
    """The platform ``cpu``: Megatron over gloo, with portable modules in plain torch.

    It implements no hook: its kernels are Anytron's defaults (:mod:`anytron.kernels`).
    """

    name = "cpu"
    api_version = 1
    accelerator = False
    redirects_torch_cuda = True
    portable_modules = True

    def probe(self) -> Probe:
        """Report the CPU, which is always available."""
        return Probe(Availability.USABLE, "the processor is always available", devices=1)

    def runtime(self) -> DeviceRuntime:
        """The runtime of the CPU in this process."""
        return _runtime()

    def peak_flops(self, dtype: str) -> PeakFlops:
        """Report no number: it depends on clock rates, on vector units and on the ranks that share the CPU."""
        del dtype
        return PeakFlops(None, "the peak of a processor depends on clock rates and on the ranks that share it")


@functools.cache
def _runtime() -> DeviceRuntime:
    from anytron_cpu.runtime import CpuRuntime

    return CpuRuntime()
