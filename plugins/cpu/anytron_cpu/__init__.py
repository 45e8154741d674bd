"""The embedded platform: the processor. The default where there is no accelerator, and the reference for others."""

from anytron_cpu.platform import CpuPlatform

__all__ = ["CpuPlatform"]
