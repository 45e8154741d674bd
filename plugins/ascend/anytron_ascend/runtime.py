"""Huawei NPUs as the engines use them."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import torch

from anytron.errors import PlatformError
from anytron.platform import DeviceRuntime, MemoryStats
from anytron_ascend import simulation


class AscendRuntime(DeviceRuntime):
    """``torch.npu``, which importing torch_npu adds to torch.

    Raises:
        PlatformError: torch_npu cannot be imported.
    """

    device_type: ClassVar[str] = "npu"
    communication_backend: ClassVar[str] = "hccl"

    def __init__(self) -> None:
        simulation.activate()
        try:
            self._npu: Any = importlib.import_module("torch_npu").npu
        except (ImportError, OSError, RuntimeError) as error:
            raise PlatformError(
                "torch_npu cannot be imported.",
                where="platform ascend",
                why=f"{type(error).__name__}: {error}",
                fix="source the set_env.sh of the CANN toolkit; torch_npu and torch must be of one minor version",
            ) from error

    def device_count(self) -> int:
        """NPUs that this process sees."""
        return int(self._npu.device_count())

    def current_device(self) -> torch.device:
        """``npu:<index>``."""
        return torch.device("npu", self._npu.current_device())

    def set_device(self, index: int) -> None:
        """Make NPU ``index`` the current one."""
        self._npu.set_device(index)

    def synchronize(self) -> None:
        """Wait for all streams of the current NPU."""
        self._npu.synchronize()

    def empty_cache(self) -> None:
        """Return cached blocks to the driver."""
        self._npu.empty_cache()

    def memory_stats(self) -> MemoryStats:
        """The caching allocator's view of the current NPU."""
        return MemoryStats(
            allocated=self._npu.memory_allocated(),
            peak_allocated=self._npu.max_memory_allocated(),
            reserved=self._npu.memory_reserved(),
            total=self._npu.get_device_properties(self._npu.current_device()).total_memory,
        )

    def manual_seed(self, seed: int) -> None:
        """Seed the current NPU's generator."""
        self._npu.manual_seed(seed)

    def get_rng_state(self) -> torch.Tensor:
        """uint8 state of the current NPU's generator."""
        state: torch.Tensor = self._npu.get_rng_state()
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore what :meth:`get_rng_state` gave."""
        self._npu.set_rng_state(state)

    def default_generator(self) -> torch.Generator:
        """The current NPU's generator; the device is initialised first, which creates the generators."""
        self._npu.init()
        generator: torch.Generator = self._npu.default_generators[self._npu.current_device()]
        return generator

    def device_name(self) -> str:
        """The current NPU's name, for example ``Ascend910B3``."""
        return str(self._npu.get_device_name(self._npu.current_device()))

    def can_pin_memory(self) -> bool:
        """Yes: copies from pinned memory run beside computation."""
        return True

    def new_stream(self) -> Any:
        """A new stream of the current NPU."""
        return self._npu.Stream()
