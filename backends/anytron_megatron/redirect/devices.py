"""Redirect the device names ``cuda``, ``cuda:1`` and ``0``, and the functions about devices and their memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils import _device as device_mode

from anytron.base.errors import EngineError
from anytron_megatron.redirect.substitution import Substitution

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from anytron.device.runtime import DeviceRuntime


PORTABLE_CAPABILITY = (8, 0)
"""Compute capability of a device that has none: the lowest with bfloat16 and grouped matrix products, which the
portable Transformer Engine computes anywhere, and below 8.9, from which on callers expect FP8."""


class DeviceTranslator:
    """Translate every way to name a CUDA device to the runtime's device; leave all others unchanged.

    ``torch.device("cuda")``, ``"cuda"`` and ``"cuda:1"`` are CUDA devices. So are plain integers, which
    ``torch.cuda.current_device()`` returns and ``device=`` accepts.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime

    def __call__(self, device: Any) -> Any:
        """Return the runtime's device for a CUDA device, and anything else unchanged.

        It runs for every new tensor, so it compares types and does not call ``isinstance``.
        """
        kind = type(device)
        if kind is torch.device:
            return self.indexed(device.index) if device.type == "cuda" else device
        if kind is str:
            return self(torch.device(device)) if device.startswith("cuda") else device
        if kind is int:
            return self.indexed(device)
        return device

    def indexed(self, index: int | None) -> torch.device:
        """Return the runtime's device ``index``; the current one for None or -1.

        For a device type without indices (the CPU), every index gives its one device.
        """
        current = self._runtime.current_device()
        if index is None or index < 0 or current.index is None:
            return current
        return torch.device(current.type, index)


def total_memory(runtime: DeviceRuntime) -> int:
    """Return the size of the device's memory in bytes.

    Raises:
        EngineError: torch cannot tell it.
    """
    total = runtime.memory_stats().total
    if total is None:
        raise EngineError(
            "The size of the device's memory is unknown.",
            where=f"torch.cuda, device type {runtime.device_type}",
            why="the platform's runtime returns memory_stats().total = None",
            fix="override memory_stats in the platform's runtime, and return the size in bytes",
        )
    return total


@dataclass(frozen=True)
class DeviceProperties:
    """The part of ``torch.cuda.get_device_properties`` that has a meaning on any device."""

    name: str
    major: int
    minor: int
    runtime: DeviceRuntime
    multi_processor_count: int = 1

    @property
    def total_memory(self) -> int:
        """The size of the device's memory in bytes (:func:`total_memory`)."""
        return total_memory(self.runtime)


class DeviceCalls:
    """The functions of ``torch.cuda`` about devices, under their own names.

    ``is_available()`` returns False. It means "CUDA itself is available". Libraries that check it
    (transformers, peft, accelerate, torch's checkpointing, Megatron's straggler detector and FP8 checkpoint
    support) have a device-neutral path, which is the right one here: after True they would launch CUDA kernels,
    pin memory or read NVML. The code that needs the redirection never calls it. ``device_count()`` is the runtime's,
    because launchers compute ranks from it.
    """

    def __init__(self, runtime: DeviceRuntime, translate: DeviceTranslator) -> None:
        self._runtime = runtime
        self._translate = translate

    def is_available(self) -> bool:
        """Return False: CUDA itself is not available (see the class)."""
        return False

    def device_count(self) -> int:
        """Return the number of devices that this process can use."""
        return self._runtime.device_count()

    def current_device(self) -> int:
        """Return the current device's index, 0 if it has none.

        It is an integer as in torch, not a ``torch.device``, so that ``f"cuda:{current_device()}"`` and
        ``default_generators[current_device()]`` work. Redirected functions translate it to the device.
        """
        return self._runtime.current_device().index or 0

    def set_device(self, device: Any) -> None:
        """Make ``device`` the current one."""
        self._runtime.set_device(self._translate(device).index or 0)

    def synchronize(self, device: Any = None) -> None:
        """Wait for everything queued on the current device."""
        del device
        self._runtime.synchronize()

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        """Return the runtime's compute capability, :data:`PORTABLE_CAPABILITY` if it has none."""
        del device
        found = self._runtime.compute_capability()
        return PORTABLE_CAPABILITY if found == (0, 0) else found

    def get_device_name(self, device: Any = None) -> str:
        """Return the current device's name."""
        del device
        return self._runtime.device_name()

    def get_device_properties(self, device: Any = None) -> DeviceProperties:
        """Return the current device's properties."""
        major, minor = self.get_device_capability(device)
        return DeviceProperties(self.get_device_name(device), major, minor, self._runtime)

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        """Whether the device computes in bfloat16."""
        del including_emulation
        return self._runtime.supports_dtype(torch.bfloat16)

    def init(self) -> None:
        """Do nothing: the platform has initialised its device."""

    def _lazy_init(self) -> None:
        """Do nothing, as :meth:`init`."""

    def _lazy_call(self, call: Callable[[], None], **_: Any) -> None:
        """Call at once; torch would queue the call until CUDA is initialised."""
        call()


class DeviceScope:
    """Replace ``torch.cuda.device``: a ``with`` block in which a device is current."""

    runtime: ClassVar[DeviceRuntime]
    translate: ClassVar[DeviceTranslator]

    def __init__(self, device: Any) -> None:
        self._inside = None if device is None or device == -1 else type(self).translate(device).index

    def __enter__(self) -> None:
        self._before = self.runtime.current_device().index
        if self._inside is not None:
            self.runtime.set_device(self._inside)

    def __exit__(self, *_: object) -> None:
        if self._inside is not None and self._before is not None:
            self.runtime.set_device(self._before)


class MemoryCalls:
    """The functions of ``torch.cuda.memory``, under their own names; a statistic that torch cannot tell is 0.

    ``torch.accelerator`` too returns 0 for such a statistic.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime

    def memory_allocated(self, device: Any = None) -> int:
        """Return the bytes in use."""
        del device
        return self._runtime.memory_stats().allocated or 0

    def max_memory_allocated(self, device: Any = None) -> int:
        """Return the most bytes that were in use."""
        del device
        return self._runtime.memory_stats().peak_allocated or 0

    def memory_reserved(self, device: Any = None) -> int:
        """Return the bytes held, in use or cached."""
        del device
        return self._runtime.memory_stats().reserved or 0

    def max_memory_reserved(self, device: Any = None) -> int:
        """Return a lower bound of the most bytes held: runtimes do not track that peak."""
        del device
        stats = self._runtime.memory_stats()
        return max(stats.reserved or 0, stats.peak_allocated or 0)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Return (bytes that this process does not hold, bytes of the device).

        Raises:
            EngineError: torch cannot tell the size.
        """
        del device
        total = total_memory(self._runtime)
        return total - self.memory_reserved(), total

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


def substitutions(runtime: DeviceRuntime, translate: DeviceTranslator) -> Iterator[Substitution]:
    """Replace the functions about devices and memory, and torch's own device scopes."""
    yield from _memory_substitutions(runtime)
    calls = DeviceCalls(runtime, translate)
    for name in (name for name, value in vars(DeviceCalls).items() if callable(value) and name != "__init__"):
        yield Substitution(torch.cuda, name, getattr(calls, name))
    bound = {"runtime": runtime, "translate": translate}
    yield Substitution(torch.cuda, "device", type("device", (DeviceScope,), bound))
    # `with torch.device("cuda")` and set_default_device: C++ makes a DeviceContext of it.
    yield Substitution(device_mode.DeviceContext, "__init__", _device_context(translate))
    yield Substitution(torch.autocast, "__init__", _autocast(runtime))


def _memory_substitutions(runtime: DeviceRuntime) -> Iterator[Substitution]:
    """Replace the functions about memory, in ``torch.cuda`` and ``torch.cuda.memory``."""
    calls = MemoryCalls(runtime)
    for name in (name for name, value in vars(MemoryCalls).items() if callable(value) and name != "__init__"):
        call = getattr(calls, name)
        yield Substitution(torch.cuda, name, call)
        yield Substitution(torch.cuda.memory, name, call)
    yield Substitution(torch.cuda, "ipc_collect", lambda: None)  # nothing is shared through CUDA IPC


def _device_context(translate: DeviceTranslator) -> Callable[..., None]:
    original = device_mode.DeviceContext.__init__

    def __init__(self: Any, device: Any) -> None:  # noqa: N807 - becomes a constructor
        original(self, translate(device))

    return __init__


def _autocast(runtime: DeviceRuntime) -> Callable[..., None]:
    original = torch.autocast.__init__

    def __init__(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, runtime.device_type if device_type == "cuda" else device_type, *args, **kwargs)

    return __init__
