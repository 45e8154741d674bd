"""A toy accelerator: the processor under another name, whose platform implements every hook.

``TOY_DEVICE`` (usable, absent, broken) says what its probe finds.
"""

from anytron_toy.platform import ToyPlatform

__all__ = ["ToyPlatform"]
