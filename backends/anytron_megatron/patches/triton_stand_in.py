"""Provide a stand-in for triton, if it is not installed, for files that import it without need.

A module finder gives the stand-in to exactly these files. No other code ever sees a module called triton, so that
libraries that look for it (torch, transformers, peft) correctly find none.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

from anytron.base.errors import EngineError
from anytron.device.patches import Installed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from anytron.device.hooks.types import PatchContext

# Modules on mcore-bridge's import path that import triton without a guard, and what their kernels are for.
CONCERNED = {
    "mcore_bridge.model.modules.kernels.qsa_block_sparse_attn": "block-sparse attention; QSA_SPARSE_KERNEL=0 avoids it",
    "megatron.core.inference.contexts.attention_context.triton.tensor_ops": "Megatron's own inference engine",
    "megatron.core.transformer.moe.paged_stash": "the paged stash of experts (megatron-core 0.18)",
    "megatron.core.transformer.moe.ops.paged_stash": "the paged stash of experts (megatron-core 0.19)",
}

NAMES = ("triton", "triton.language", "triton.language.extra.libdevice", "triton.runtime", "triton.runtime.driver")
"""Modules that have a stand-in."""


def stand_in_for_triton(_context: PatchContext) -> Installed:
    """Let Megatron and mcore-bridge be imported without triton."""
    return stand_in_during_imports(CONCERNED)


def stand_in_during_imports(concerned: Mapping[str, str]) -> Installed:
    """Insert the finder unless triton is installed.

    Args:
        concerned: Modules or packages that get the stand-in, each with the purpose of its kernels.
    """
    if importlib.util.find_spec("triton") is not None:
        return Installed(lambda: None, "not needed: triton is installed")
    finder = _Finder(concerned)
    sys.meta_path.insert(0, finder)
    return Installed(lambda: sys.meta_path.remove(finder))


class _Finder(MetaPathFinder):
    def __init__(self, concerned: Mapping[str, str]) -> None:
        self._concerned = concerned

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        use = next((use for name, use in self._concerned.items() if f"{fullname}.".startswith(f"{name}.")), None)
        if use is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, use)
        return spec


class _Loader(Loader):
    """Execute a module with the stand-ins in ``sys.modules``."""

    def __init__(self, loader: Loader, use: str) -> None:
        self._loader = loader
        self._use = use

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with _stand_ins(module.__name__, self._use):
            self._loader.exec_module(module)


@contextmanager
def _stand_ins(user: str, use: str) -> Iterator[None]:
    modules = {name: _StandInModule(name, user, use) for name in NAMES}
    outer = {name: sys.modules[name] for name in NAMES if name in sys.modules}  # one such module imports another
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(outer)


def _importing() -> bool:
    """Whether a module is being executed with stand-ins: it may call attributes of one that it has imported."""
    return isinstance(sys.modules.get("triton"), _StandInModule)


@dataclass(frozen=True)
class _Import:
    """The module that was executed with stand-ins, and what its kernels are for."""

    user: str
    use: str


class _StandInModule(ModuleType):
    """A module whose attributes are all stand-ins."""

    def __init__(self, name: str, user: str, use: str) -> None:
        super().__init__(name)
        self._import = _Import(user, use)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> _StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn(f"{self.__name__}.{name}", self._import)


class _StandIn:
    """An attribute of triton: it can be read and used as a decorator during the import, and not called later."""

    def __init__(self, name: str, during: _Import) -> None:
        self._name = name
        self._import = during

    def __getattr__(self, name: str) -> _StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn(f"{self._name}.{name}", self._import)

    def __getitem__(self, grid: Any) -> _StandIn:
        # kernel[grid](...): the call refuses.
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _StandIn:
        # A call without arguments is no decorator: it asks for a device or a version.
        if not _importing() or not (args or kwargs):
            raise EngineError(
                f"{self._name} was called, but triton is not installed.",
                where=self._import.user,
                why=f"it is a triton kernel ({self._import.use})",
                fix="install triton if it supports your device, or turn off the feature that needs it",
            )
        if len(args) == 1 and callable(args[0]) and not kwargs:
            # A decorated kernel keeps its name for the message above.
            return _StandIn(getattr(args[0], "__name__", self._name), self._import)
        return self
