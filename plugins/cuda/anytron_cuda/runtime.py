"""NVIDIA GPUs as the engines use them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from anytron.platform import DeviceRuntime, MemoryStats

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class CudaRuntime(DeviceRuntime):
    """``torch.cuda``."""

    device_type: ClassVar[str] = "cuda"
    communication_backend: ClassVar[str] = "nccl"

    def device_count(self) -> int:
        """GPUs that this process sees."""
        return torch.cuda.device_count()

    def current_device(self) -> torch.device:
        """``cuda:<index>``."""
        return torch.device("cuda", torch.cuda.current_device())

    def set_device(self, index: int) -> None:
        """Make GPU ``index`` the current one."""
        torch.cuda.set_device(index)

    def synchronize(self) -> None:
        """Wait for all streams of the current GPU."""
        torch.cuda.synchronize()

    def empty_cache(self) -> None:
        """Return cached blocks to the driver."""
        torch.cuda.empty_cache()

    def memory_stats(self) -> MemoryStats:
        """The caching allocator's view of the current GPU."""
        return MemoryStats(
            allocated=torch.cuda.memory_allocated(),
            peak_allocated=torch.cuda.max_memory_allocated(),
            reserved=torch.cuda.memory_reserved(),
            total=torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory,
        )

    def manual_seed(self, seed: int) -> None:
        """Seed the current GPU's generator."""
        torch.cuda.manual_seed(seed)

    def get_rng_state(self) -> torch.Tensor:
        """uint8 state of the current GPU's generator."""
        return torch.cuda.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore a state from :meth:`get_rng_state`."""
        torch.cuda.set_rng_state(state)

    def default_generator(self) -> torch.Generator:
        """The current GPU's generator; CUDA is initialised first, which creates the generators."""
        torch.cuda.init()
        return torch.cuda.default_generators[torch.cuda.current_device()]

    def device_name(self) -> str:
        """The current GPU's name."""
        return torch.cuda.get_device_name()

    def compute_capability(self) -> tuple[int, int]:
        """(major, minor) of the current GPU."""
        return torch.cuda.get_device_capability()

    def can_pin_memory(self) -> bool:
        """Return True: copies from pinned memory overlap with computation."""
        return True

    def new_stream(self) -> torch.cuda.Stream:
        """A new stream of the current GPU."""
        return torch.cuda.Stream()

    def profiler_range(self, name: str) -> AbstractContextManager[None]:
        """An NVTX range."""
        return torch.cuda.nvtx.range(name)
