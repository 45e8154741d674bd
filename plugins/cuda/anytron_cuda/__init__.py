"""The CUDA platform: NVIDIA GPUs."""

from anytron_cuda.platform import CudaPlatform

__all__ = ["CudaPlatform"]
