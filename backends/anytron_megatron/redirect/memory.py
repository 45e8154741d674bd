"""Redirect the functions about memory: sizes in bytes, as the runtime counts them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from anytron_megatron.redirect.substitution import Substitution

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.device.runtime import DeviceRuntime


class MemoryCalls:
    """The functions of ``torch.cuda.memory``, under their own names."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime

    def memory_allocated(self, device: Any = None) -> int:
        """Return the bytes in use."""
        del device
        return self._runtime.memory_stats().allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        """Return the most bytes that were in use."""
        del device
        return self._runtime.memory_stats().peak_allocated

    def memory_reserved(self, device: Any = None) -> int:
        """Return the bytes held, in use or cached."""
        del device
        return self._runtime.memory_stats().reserved

    def max_memory_reserved(self, device: Any = None) -> int:
        """Return a lower bound of the most bytes held: runtimes do not track that peak."""
        del device
        stats = self._runtime.memory_stats()
        return max(stats.reserved, stats.peak_allocated)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Return (bytes not held by this process, the device's size)."""
        del device
        stats = self._runtime.memory_stats()
        return stats.total - stats.reserved, stats.total

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """Return the statistics that have a meaning on any device, under torch's keys."""
        return {
            "allocated_bytes.all.current": self.memory_allocated(device),
            "allocated_bytes.all.peak": self.max_memory_allocated(device),
            "reserved_bytes.all.current": self.memory_reserved(device),
            "reserved_bytes.all.peak": self.max_memory_reserved(device),
        }

    def memory_summary(self, device: Any = None, abbreviated: bool = False) -> str:
        """Return the statistics as text."""
        del abbreviated
        return "\n".join(f"{key}: {value}" for key, value in self.memory_stats(device).items())

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Reset the peak."""
        del device
        self._runtime.reset_peak_memory_stats()

    def reset_max_memory_allocated(self, device: Any = None) -> None:
        """Reset the peak, as :meth:`reset_peak_memory_stats`."""
        self.reset_peak_memory_stats(device)

    def empty_cache(self) -> None:
        """Return cached memory to the device."""
        self._runtime.empty_cache()


def substitutions(runtime: DeviceRuntime) -> Iterator[Substitution]:
    """Replace the functions about memory, in ``torch.cuda`` and ``torch.cuda.memory``."""
    calls = MemoryCalls(runtime)
    for name in (name for name, value in vars(MemoryCalls).items() if callable(value) and name != "__init__"):
        call = getattr(calls, name)
        yield Substitution(torch.cuda, name, call)
        yield Substitution(torch.cuda.memory, name, call)
    yield Substitution(torch.cuda, "ipc_collect", lambda: None)  # nothing is shared through CUDA IPC
