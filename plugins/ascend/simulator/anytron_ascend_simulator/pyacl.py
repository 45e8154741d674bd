"""pyACL, CANN's Python interface, as far as training code asks it: the module ``acl`` that no package registry has."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType
from typing import Any


def install_pyacl(runtime: ctypes.CDLL) -> None:
    """Make ``import acl`` find it; ``runtime`` is the simulated libascendcl.so."""
    sys.modules["acl"] = _PyAcl(runtime)


class _PyAcl(ModuleType):
    def __init__(self, runtime: ctypes.CDLL) -> None:
        super().__init__("acl", "Simulated.")
        self._soc_name = runtime.aclrtGetSocName
        self._soc_name.restype = ctypes.c_char_p

    def get_soc_name(self) -> str:
        """The chip that is simulated."""
        return str(self._soc_name().decode())

    def __getattr__(self, name: str) -> Any:
        # AttributeError, so that hasattr works and __spec__ and its like are simply absent.
        raise AttributeError(f"the Ascend simulator has no acl.{name}: of pyACL it has get_soc_name only")
