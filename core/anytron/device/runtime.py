"""The device interface for engines: :class:`DeviceRuntime`, the base class in a platform's ``runtime.py``."""

from __future__ import annotations

import abc
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from anytron.base.errors import PlatformError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


@dataclass(frozen=True)
class MemoryStats:
    """Device memory of this process, in bytes; None where torch cannot tell on this device.

    Attributes:
        allocated: Memory occupied by tensors now.
        peak_allocated: Maximum of ``allocated`` since the start, or since ``reset_peak_memory_stats``.
        reserved: Memory that the allocator holds, cached blocks included.
        total: Total memory of the device.
    """

    allocated: int | None
    peak_allocated: int | None
    reserved: int | None
    total: int | None


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
    def default_generator(self) -> torch.Generator | None:
        """The generator that device operations draw from; None where torch has no access to it."""

    def device_name(self) -> str:
        """Name of the current device, for display."""
        return self.device_type

    def compute_capability(self) -> tuple[int, int]:
        """CUDA's compute capability (major, minor); (0, 0) on devices that have none.

        On such devices, code that is redirected from ``torch.cuda`` reads (8, 0), because the portable modules compute
        everything that a GPU of 8.0 can.
        """
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


class AcceleratorRuntime(DeviceRuntime):
    """A device that torch knows: a subclass sets only ``device_type`` and ``communication_backend``.

    Each method calls a function of the device's own module, ``torch.<device_type>``, with the same name as in
    ``torch.cuda``. If the module lacks the function, and the machine's accelerator is of this type, the method calls
    the function of ``torch.accelerator``. The module is first, because its vendor may do more:
    ``torch.cuda.set_device`` and ``torch.npu.set_device`` prepare the device, which
    ``torch.accelerator.set_device_index`` does not.

    A plugin must import the package that adds the device to torch before it makes an instance.

    Raises:
        PlatformError: torch has no module ``torch.<device_type>``, or neither module has a function that is needed.
    """

    def __init__(self) -> None:
        import torch

        try:
            self.module: Any = torch.get_device_module(self.device_type)
        except RuntimeError as error:
            raise PlatformError(
                f"torch has no module torch.{self.device_type}.",
                where=type(self).__qualname__,
                why=str(error),
                fix="import the package that adds the device to torch before the runtime is made; the package calls "
                f"torch._register_device_module('{self.device_type}', module)",
            ) from error

    def device_count(self) -> int:
        """Devices that this process sees."""
        return int(self._needed("device_count")())

    def current_device(self) -> torch.device:
        """The current device, ``<device_type>:<index>``."""
        import torch

        return torch.device(self.device_type, self._index())

    def set_device(self, index: int) -> None:
        """Make device ``index`` the current one."""
        self._needed("set_device", "set_device_index")(index)

    def synchronize(self) -> None:
        """Wait for all streams of the current device."""
        self._needed("synchronize")()

    def empty_cache(self) -> None:
        """Return the allocator's cached, unused blocks to the device; does nothing if torch cannot."""
        self._ask("empty_cache")

    def memory_stats(self) -> MemoryStats:
        """Memory of the current device, as torch's allocator counts it."""
        return MemoryStats(
            allocated=self._ask("memory_allocated"),
            peak_allocated=self._ask("max_memory_allocated"),
            reserved=self._ask("memory_reserved"),
            total=self._total_memory(),
        )

    def reset_peak_memory_stats(self) -> None:
        """Reset the allocator's peak; does nothing if torch cannot."""
        self._ask("reset_peak_memory_stats")

    def manual_seed(self, seed: int) -> None:
        """Seed the current device's generator; all devices' generators if torch can only seed all."""
        own = getattr(self.module, "manual_seed", None)
        (self._needed("manual_seed_all") if own is None else own)(seed)

    def get_rng_state(self) -> torch.Tensor:
        """State of the current device's generator, a uint8 tensor on the host."""
        state: torch.Tensor = self._needed("get_rng_state")()
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore a state from :meth:`get_rng_state`."""
        self._needed("set_rng_state")(state)

    def default_generator(self) -> torch.Generator | None:
        """The current device's generator; the device is initialised first, which creates the generators.

        None if the device's module has no ``default_generators``.
        """
        if (initialise := getattr(self.module, "init", None)) is not None:
            initialise()
        index = self._index()
        generators = getattr(self.module, "default_generators", None)
        return None if generators is None else generators[index]

    def device_name(self) -> str:
        """The current device's name, as its vendor's library reports it; the type if torch has no function for it."""
        name = getattr(self.module, "get_device_name", None)
        return self.device_type if name is None else str(name(self._index()))

    def can_pin_memory(self) -> bool:
        """Return True: copies from pinned memory overlap with computation."""
        return True

    def new_stream(self) -> Any:
        """A new stream of the current device, of the module's class ``Stream`` or of ``torch.Stream``.

        Before torch 2.7, a ``with`` block of a ``torch.Stream`` fails.
        """
        import torch

        return self.module.Stream() if self._has_streams else torch.Stream(device=self.current_device())

    def current_stream(self) -> Any:
        """The stream in use on the current device; initialises the device if necessary."""
        return self.module.current_stream() if self._has_streams else self._needed("current_stream")()

    @property
    def _has_streams(self) -> bool:
        return hasattr(self.module, "Stream") and hasattr(self.module, "current_stream")

    @cached_property
    def _accelerator(self) -> Any:
        """``torch.accelerator``, or None if it stands for another device or for none."""
        import torch

        try:
            found = torch.accelerator.current_accelerator()
        except RuntimeError:  # torch 2.6: the machine has no accelerator
            return None
        return torch.accelerator if found is not None and found.type == self.device_type else None

    def _function(self, name: str, of_accelerator: str) -> Any:
        own = getattr(self.module, name, None)
        return getattr(self._accelerator, of_accelerator, None) if own is None else own

    def _needed(self, name: str, of_accelerator: str = "") -> Any:
        """Find a function by its name in ``torch.cuda``, and its name in ``torch.accelerator`` if that is another."""
        of_accelerator = of_accelerator or name
        found = self._function(name, of_accelerator)
        if found is None:
            raise PlatformError(
                f"torch has no function {name} for the device type {self.device_type}.",
                where=type(self).__qualname__,
                why=f"neither torch.{self.device_type}.{name} nor torch.accelerator.{of_accelerator} can be called",
                fix=f"update torch or the package that adds {self.device_type} to it, or override the method of the "
                "runtime that needs the function",
            )
        return found

    def _ask(self, name: str) -> Any:
        """Call a function of the allocator; None if torch has no such function for this device."""
        function = self._function(name, name)
        return None if function is None else _answer(function)

    def _index(self) -> int:
        return int(self._needed("current_device", "current_device_index")())

    def _total_memory(self) -> int | None:
        if (properties := getattr(self.module, "get_device_properties", None)) is not None:
            total = getattr(properties(self._index()), "total_memory", None)
            if total is not None:
                return int(total)
        info = self._ask("get_memory_info")
        return None if info is None else int(info[1])


def _answer(function: Callable[[], Any]) -> Any:
    """Call a function of torch's allocator; None if the device's allocator has no statistics.

    Raises:
        RuntimeError: Any other error of the device.
    """
    try:
        return function()
    except NotImplementedError:
        return None
    except RuntimeError as error:  # c10/core/CachingDeviceAllocator.h: getDeviceAllocator
        if "is not a DeviceAllocator" in str(error):
            return None
        raise
