"""The device interface for engines: :class:`DeviceRuntime`, the base class in a platform's ``runtime.py``."""

from __future__ import annotations

import abc
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MemoryStats:
    """Device memory of this process, in bytes.

    Attributes:
        allocated: Memory occupied by tensors now.
        peak_allocated: Maximum of ``allocated`` since the start, or since ``reset_peak_memory_stats``.
        reserved: Memory that the allocator holds, cached blocks included.
        total: Total memory of the device.
    """

    allocated: int
    peak_allocated: int
    reserved: int
    total: int


class DeviceRuntime(abc.ABC):
    """The interface through which engines use the device. Each process has one instance.

    Engines whose code hard-codes ``torch.cuda`` are redirected to this object on platforms whose
    ``redirects_torch_cuda`` is True.
    """

    device_type: ClassVar[str]
    """``torch.device`` type, for example ``cpu``."""
    communication_backend: ClassVar[str]
    """Name of the ``torch.distributed`` backend for tensors of this device."""

    @abc.abstractmethod
    def device_count(self) -> int:
        """How many devices this process can use."""

    @abc.abstractmethod
    def current_device(self) -> torch.device:
        """The device on which new tensors of this process belong, with its index if it has one."""

    @abc.abstractmethod
    def set_device(self, index: int) -> None:
        """Make device ``index`` the current one."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until everything queued on the current device is done."""

    @abc.abstractmethod
    def empty_cache(self) -> None:
        """Return cached, unused memory to the device."""

    @abc.abstractmethod
    def memory_stats(self) -> MemoryStats:
        """Memory of the current device."""

    @abc.abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the device's random number generator."""

    @abc.abstractmethod
    def get_rng_state(self) -> torch.Tensor:
        """State of the device's generator, a uint8 tensor on the host."""

    @abc.abstractmethod
    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore a state from :meth:`get_rng_state`."""

    @abc.abstractmethod
    def default_generator(self) -> torch.Generator:
        """The generator that device operations draw from."""

    def device_name(self) -> str:
        """Name of the current device, for display."""
        return self.device_type

    def compute_capability(self) -> tuple[int, int]:
        """CUDA's compute capability (major, minor), for engine code that reads it; (0, 0) on devices that have none."""
        return (0, 0)

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """Whether matrix products and collectives run in ``dtype``."""
        del dtype
        return True

    def can_pin_memory(self) -> bool:
        """Whether host memory can be pinned for this device."""
        return False

    def reset_peak_memory_stats(self) -> None:  # noqa: B027 - optional to override
        """Reset ``memory_stats().peak_allocated``; does nothing if the device does not support it."""

    def new_stream(self) -> Any:
        """A new stream; None where the device runs everything in order.

        Streams have the interface of ``torch.Stream``: ``wait_stream``, ``wait_event``,
        ``record_event``, ``query``, ``synchronize``, and a ``with`` block that makes one current.
        """
        return None

    def current_stream(self) -> Any:
        """The stream in use; None exactly where :meth:`new_stream` returns None."""
        return None

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an error says that the device has no memory left.

        Torch's own allocator raises ``torch.OutOfMemoryError`` on every device. A device whose libraries allocate by
        themselves and raise other errors overrides this method.
        """
        import torch

        return isinstance(error, torch.OutOfMemoryError)

    def profiler_range(self, name: str) -> AbstractContextManager[None]:
        """Mark a range in the device's own profiler; every call of a training engine is one range, named by the method.

        Traces of ``trainer.profile`` contain these ranges even where this method does nothing.
        """
        del name
        return nullcontext()


class TorchDeviceRuntime(DeviceRuntime):
    """A device whose module in torch has the interface of ``torch.cuda``: ``torch.<device_type>``.

    A plugin must import the package that adds this module to torch before it makes an instance.
    """

    def __init__(self) -> None:
        import torch

        self.module: Any = torch.get_device_module(self.device_type)

    def device_count(self) -> int:
        """Devices that this process sees."""
        return int(self.module.device_count())

    def current_device(self) -> torch.device:
        """The current device, ``<device_type>:<index>``."""
        import torch

        return torch.device(self.device_type, self.module.current_device())

    def set_device(self, index: int) -> None:
        """Make device ``index`` the current one."""
        self.module.set_device(index)

    def synchronize(self) -> None:
        """Wait for all streams of the current device."""
        self.module.synchronize()

    def empty_cache(self) -> None:
        """Return the allocator's cached, unused blocks to the device."""
        self.module.empty_cache()

    def memory_stats(self) -> MemoryStats:
        """The caching allocator's view of the current device."""
        return MemoryStats(
            allocated=self.module.memory_allocated(),
            peak_allocated=self.module.max_memory_allocated(),
            reserved=self.module.memory_reserved(),
            total=self.module.get_device_properties(self.module.current_device()).total_memory,
        )

    def reset_peak_memory_stats(self) -> None:
        """Reset the allocator's peak."""
        self.module.reset_peak_memory_stats()

    def manual_seed(self, seed: int) -> None:
        """Seed the current device's generator."""
        self.module.manual_seed(seed)

    def get_rng_state(self) -> torch.Tensor:
        """State of the current device's generator, a uint8 tensor on the host."""
        state: torch.Tensor = self.module.get_rng_state()
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore a state from :meth:`get_rng_state`."""
        self.module.set_rng_state(state)

    def default_generator(self) -> torch.Generator:
        """The current device's generator; the device is initialised first, which creates the generators."""
        self.module.init()
        generator: torch.Generator = self.module.default_generators[self.module.current_device()]
        return generator

    def device_name(self) -> str:
        """The current device's name, as its vendor's library reports it."""
        return str(self.module.get_device_name(self.module.current_device()))

    def can_pin_memory(self) -> bool:
        """Return True: copies from pinned memory overlap with computation."""
        return True

    def new_stream(self) -> Any:
        """A new stream of the current device."""
        return self.module.Stream()

    def current_stream(self) -> Any:
        """The stream in use on the current device; initialises the device if necessary."""
        return self.module.current_stream()
