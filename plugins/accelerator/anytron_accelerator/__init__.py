"""The embedded platform for any device that ``torch.accelerator`` knows. It is used only if the user names it."""

from anytron_accelerator.platform import AcceleratorPlatform

__all__ = ["AcceleratorPlatform"]
