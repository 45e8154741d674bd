"""The device runtime of the CPU."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import ClassVar

import torch

from anytron import DeviceRuntime, EngineError, MemoryStats


class CpuRuntime(DeviceRuntime):
    """The runtime of the CPU: one device that all processes share; an operation is done when it returns."""

    device_type: ClassVar[str] = "cpu"
    communication_backend: ClassVar[str] = "gloo"

    def device_count(self) -> int:
        """Return 1: ranks share the CPU."""
        return 1

    def current_device(self) -> torch.device:
        """The device ``cpu``, without an index, like the device of its tensors."""
        return torch.device("cpu")

    def set_device(self, index: int) -> None:
        """Accept any rank's index: all of them mean the one CPU device.

        Raises:
            EngineError: The index is negative.
        """
        if index < 0:
            raise EngineError(
                f"There is no device {index}.",
                where="CpuRuntime.set_device",
                why="the index is negative",
                fix="pass the local rank, a number from 0 on",
            )

    def synchronize(self) -> None:
        """Do nothing: operations are done when they return."""

    def empty_cache(self) -> None:
        """Do nothing: torch keeps no cache of host memory."""

    def memory_stats(self) -> MemoryStats:
        """Resident memory of this process, and the total memory of the machine.

        ``allocated`` and ``reserved`` are the resident set (``/proc/self/statm``, in pages),
        ``peak_allocated`` its maximum so far (``getrusage``, in KiB on Linux).
        """
        page = os.sysconf("SC_PAGE_SIZE")
        resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * page
        # The kernel updates the maximum lazily, so that it can lag behind the current value.
        peak = max(resident, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return MemoryStats(
            allocated=resident, peak_allocated=peak, reserved=resident, total=os.sysconf("SC_PHYS_PAGES") * page
        )

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether Python or torch's CPU allocator (c10/core/impl/alloc_cpu.cpp) could not allocate."""
        return isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)

    def manual_seed(self, seed: int) -> None:
        """Seed torch's CPU generator."""
        torch.default_generator.manual_seed(seed)

    def get_rng_state(self) -> torch.Tensor:
        """The state of torch's CPU generator, uint8."""
        return torch.default_generator.get_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore a state from :meth:`get_rng_state`."""
        torch.default_generator.set_state(state)

    def default_generator(self) -> torch.Generator:
        """The CPU generator of torch."""
        return torch.default_generator

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """Whether matrix products and gloo support ``dtype``: they support all but 8-bit floating-point types."""
        return not (dtype.is_floating_point and dtype.itemsize < 2)
