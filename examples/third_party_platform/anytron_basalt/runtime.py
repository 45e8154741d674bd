"""The device as the engines use it. Basalt's simulator computes on the host's processor, and so does its runtime.

A device that torch knows has ``anytron.AcceleratorRuntime`` for a base class, and two attributes.
"""

from __future__ import annotations

import basalt_sdk

from anytron_cpu.runtime import CpuRuntime


class BasaltRuntime(CpuRuntime):
    """The simulator of a Basalt accelerator."""

    def device_count(self) -> int:
        """Return the number of devices that the driver reports; in the simulator they share the processor."""
        return basalt_sdk.device_count()

    def device_name(self) -> str:
        """Say that it is a simulator."""
        return "Basalt, simulated on the host's processor"
