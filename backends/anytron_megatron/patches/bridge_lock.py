"""Give mcore-bridge the lock of the library filelock, instead of importing two large libraries for it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

from anytron.device.patches import Installed
from anytron_megatron.patches.stand_ins import show_during_import

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anytron.device.hooks.types import PatchContext

CONCERNED = "mcore_bridge.utils.torch_utils"
"""The module that imports a lock from ``datasets`` and the directory of the lock's files from ``modelscope``."""


def lock_without_datasets(_context: PatchContext) -> Installed:
    """Let mcore-bridge be imported without ``datasets``, and import ``modelscope`` only when it takes a lock."""
    if CONCERNED in sys.modules:
        return Installed(lambda: None, "not needed: mcore-bridge was imported earlier in this process")
    return show_during_import(lambda name: _stand_ins() if name == CONCERNED else {})


def _stand_ins() -> Mapping[str, ModuleType]:
    from filelock import FileLock

    lock = ModuleType("datasets.utils.filelock")
    directory = ModuleType("modelscope.hub.utils.utils")
    vars(lock)["FileLock"], vars(directory)["get_cache_dir"] = FileLock, _cache_directory
    return {module.__name__: module for module in (lock, directory)}


def _cache_directory() -> str:
    """Return what ``modelscope`` says, which mcore-bridge asks when it takes a lock."""
    from modelscope.hub.utils.utils import get_cache_dir

    return str(get_cache_dir())
