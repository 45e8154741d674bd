"""Anytron: reinforcement-learning training of language models on Megatron-Core, on any accelerator.

A plugin author needs three names from here::

    from anytron import Platform, hookimpl

    class MyChip(Platform):          # entry point group ``anytron.platforms``
        name = "mychip"

        @hookimpl
        def attention_kernel(self, spec): ...

Importing this package is light: no torch, no engine, no device library, and nothing is patched.
"""

from anytron.hooks.markers import hookimpl
from anytron.platform import Platform

__version__ = "0.1.0"

__all__ = ["Platform", "__version__", "hookimpl"]
