"""The device runtime of NVIDIA GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from anytron import AcceleratorRuntime

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

OUT_OF_MEMORY = (
    "CUBLAS_STATUS_ALLOC_FAILED",  # cublasCreate: its workspace
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",  # cudaMalloc, of whoever called it
    "Cuda failure 'out of memory'",  # NCCL: its buffers
)
"""Parts of the error messages of libraries that allocate memory without torch's allocator."""


class CudaRuntime(AcceleratorRuntime):
    """The runtime of ``torch.cuda`` devices."""

    device_type: ClassVar[str] = "cuda"
    communication_backend: ClassVar[str] = "nccl"

    def __init__(self) -> None:
        """Make cuDNN compute float32 convolutions in float32, as torch computes products; torch's default is TF32.

        Patches of images go through a convolution: with TF32, log-probs of Qwen3.5 were 1.4e-4 off on an H100 (torch
        2.11).
        """
        super().__init__()
        import torch

        torch.backends.cudnn.allow_tf32 = False

    def compute_capability(self) -> tuple[int, int]:
        """(major, minor) of the current GPU."""
        capability: tuple[int, int] = self.module.get_device_capability()
        return capability

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether torch's allocator, or a library with its own allocations, ran out of memory."""
        return super().is_out_of_memory(error) or any(words in str(error) for words in OUT_OF_MEMORY)

    def profiler_range(self, name: str) -> AbstractContextManager[None]:
        """Mark an NVTX range."""
        scope: AbstractContextManager[None] = self.module.nvtx.range(name)
        return scope
