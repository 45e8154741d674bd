"""Put the portable modules under the name ``transformer_engine``."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import pkgutil
import sys
from typing import TYPE_CHECKING

from anytron.base.errors import PatchError
from anytron_megatron import portable_te
from anytron_megatron.portable_te.binding import bind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from anytron.kernels.contract import KernelSource

logger = logging.getLogger(__name__)

NAME = "transformer_engine"
COMPILED = "transformer_engine_torch"
"""The compiled part of a real Transformer Engine, which Megatron imports directly (megatron/core/utils.py, line 83)."""


def install(kernels: KernelSource, device_type: str) -> Callable[[], None]:
    """Make ``import transformer_engine`` import the portable modules, and bind their kernels.

    ``transformer_engine.x`` and ``anytron_megatron.portable_te.x`` are the same module objects, so
    that classes are equal whatever name they were imported by. Their ``__spec__`` is the portable module's, so that
    ``importlib.util.find_spec`` finds the name (peft calls it); there is no distribution metadata (accelerate and
    transformers ask for it and conclude that TE is absent).

    If a real Transformer Engine is installed, its name is taken all the same, and a warning says so; its compiled part
    cannot be imported.

    Raises:
        PatchError: ``transformer_engine`` was imported earlier in this process.
    """
    present = sys.modules.get(NAME)
    if present is not None:
        raise PatchError(
            "The portable Transformer Engine cannot be imported as transformer_engine.",
            where=f"sys.modules[{NAME!r}]",
            why="this process has already imported another transformer_engine, from "
            f"{getattr(present, '__file__', 'an unknown place')}",
            fix="apply the patches before transformer_engine is imported (Megatron, peft and accelerate import it)",
        )
    real = importlib.util.find_spec(NAME)
    if real is not None:
        logger.warning("transformer_engine at %s is not used: the portable one is imported instead", real.origin)
    aliases = {f"{NAME}{module.__name__.removeprefix(portable_te.__name__)}": module for module in _modules()}
    unbind = bind(kernels, device_type)
    sys.modules.update(aliases)
    sys.modules[COMPILED] = None  # type: ignore[assignment]  # an import of it fails, as if it were not installed

    def undo() -> None:
        for alias, module in (*aliases.items(), (COMPILED, None)):
            if alias in sys.modules and sys.modules[alias] is module:
                del sys.modules[alias]
        unbind()

    return undo


def _modules() -> Iterator[ModuleType]:
    """All modules that have a counterpart in Transformer Engine, and the package itself."""
    yield portable_te
    for package in (portable_te.common, portable_te.pytorch):
        yield package
        for found in pkgutil.walk_packages(package.__path__, prefix=f"{package.__name__}."):
            yield importlib.import_module(found.name)
