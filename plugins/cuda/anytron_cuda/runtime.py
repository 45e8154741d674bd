"""NVIDIA GPUs as the engines use them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from anytron.platform import TorchDeviceRuntime

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class CudaRuntime(TorchDeviceRuntime):
    """``torch.cuda``."""

    device_type: ClassVar[str] = "cuda"
    communication_backend: ClassVar[str] = "nccl"

    def compute_capability(self) -> tuple[int, int]:
        """(major, minor) of the current GPU."""
        capability: tuple[int, int] = self.module.get_device_capability()
        return capability

    def profiler_range(self, name: str) -> AbstractContextManager[None]:
        """An NVTX range."""
        scope: AbstractContextManager[None] = self.module.nvtx.range(name)
        return scope
