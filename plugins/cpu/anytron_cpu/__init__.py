"""The embedded platform: the CPU. It is the default without an accelerator, and the reference for other platforms."""

from anytron_cpu.platform import CpuPlatform

__all__ = ["CpuPlatform"]
