"""Stand-ins for triton while a few files are executed that import it without need, where it is not installed.

A module finder concerns exactly those files: nobody else ever sees a module called triton, so that
libraries that look for it (torch, transformers, peft) find the truth.
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

from anytron.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# Modules on mcore-bridge's import path that import triton unguarded, and what their kernels are for.
CONCERNED = {
    "mcore_bridge.model.modules.kernels.qsa_block_sparse_attn": "block-sparse attention; QSA_SPARSE_KERNEL=0 avoids it",
    "megatron.core.inference.contexts.attention_context.triton.tensor_ops": "Megatron's own inference engine",
    "megatron.core.transformer.moe.ops.paged_stash": "the paged stash of experts (megatron-core 0.19)",
}


def install() -> Callable[[], None]:
    """Insert the finder, unless triton is installed; return the function that removes it."""
    if importlib.util.find_spec("triton") is not None:
        return lambda: None
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    return lambda: sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in CONCERNED:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Executes a module with the stand-ins in ``sys.modules``."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with _stand_ins(module.__name__):
            self._loader.exec_module(module)


@contextmanager
def _stand_ins(user: str) -> Iterator[None]:
    modules = {name: _StandInModule(name, user) for name in ("triton", "triton.language")}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        for stand_in in modules.values():
            stand_in.refuse()


@dataclass
class _Import:
    """The module that is being executed with stand-ins, and whether that is over."""

    user: str
    finished: bool = False


class _StandInModule(ModuleType):
    """A module of which every attribute is a stand-in."""

    def __init__(self, name: str, user: str) -> None:
        super().__init__(name)
        self._import = _Import(user)
        self.__path__: list[str] = []

    def refuse(self) -> None:
        """From now on, calls raise."""
        self._import.finished = True

    def __getattr__(self, name: str) -> _StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn(f"{self.__name__}.{name}", self._import)


class _StandIn:
    """An attribute of triton: may be named and used as a decorator during the import, never called after it."""

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
        if self._import.finished:
            raise EngineError(
                f"{self._name} was called, and triton is not installed",
                where=self._import.user,
                why=f"it is a triton kernel ({CONCERNED[self._import.user]})",
                fix="install triton if your device has one, or turn the feature off that needs it",
            )
        if len(args) == 1 and callable(args[0]) and not kwargs:
            # A decorated kernel keeps its name for the message above.
            return _StandIn(getattr(args[0], "__name__", self._name), self._import)
        return self
