"""Let some files import modules that no other code sees."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING

from anytron.device.patches import Installed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import ModuleType

    StandIns = Callable[[str], Mapping[str, ModuleType]]


def show_during_import(stand_ins: StandIns) -> Installed:
    """Let chosen modules import stand-ins for other modules, while the files of the chosen modules are executed.

    Modules that were imported before this call are not affected.

    Args:
        stand_ins: Called with the full name of each module that is imported from now on; returns the stand-ins that
            this module finds in ``sys.modules`` while its file is executed, by name. An empty mapping = no stand-ins.
    """
    finder = _Finder(stand_ins)
    sys.meta_path.insert(0, finder)
    return Installed(lambda: sys.meta_path.remove(finder))


class _Finder(MetaPathFinder):
    def __init__(self, stand_ins: StandIns) -> None:
        self._stand_ins = stand_ins

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        modules = self._stand_ins(fullname)
        if not modules:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, modules)
        return spec


class _Loader(Loader):
    """Execute a module with the stand-ins in ``sys.modules``."""

    def __init__(self, loader: Loader, modules: Mapping[str, ModuleType]) -> None:
        self._loader = loader
        self._modules = modules

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with _shown(self._modules):
            self._loader.exec_module(module)


@contextmanager
def _shown(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    outer = {name: sys.modules[name] for name in modules if name in sys.modules}  # one such module imports another
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(outer)
