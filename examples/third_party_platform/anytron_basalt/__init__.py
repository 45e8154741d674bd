"""The platform of the invented Basalt accelerators: a complete plugin, which implements every hook."""

from anytron_basalt.platform import BasaltPlatform

__all__ = ["BasaltPlatform"]
