"""Provide a stand-in for triton, if it is not installed, for files that import it without need.

Only these files see it (:mod:`anytron_megatron.patches.stand_ins`), so that libraries that look for triton (torch,
transformers, peft) correctly find none.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from anytron.base.errors import EngineError
from anytron.device.patches import Installed
from anytron_megatron.patches.stand_ins import show_during_import

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anytron.device.hooks.types import PatchContext

# Modules of megatron-core and mcore-bridge that need triton and are imported without a guard, and the purpose of
# their kernels. A test imports every module of megatron-core.
CONCERNED = {
    "mcore_bridge.model.modules.kernels.qsa_block_sparse_attn": "block-sparse attention; QSA_SPARSE_KERNEL=0 avoids it",
    "megatron.core.inference.contexts.attention_context.triton.tensor_ops": "Megatron's own inference engine",
    "megatron.core.transformer.custom_layers.batch_invariant_kernels": "batch-invariant mode (batch_invariant_mode)",
    "megatron.core.transformer.moe.paged_stash": "the paged stash of experts (megatron-core 0.18)",
    "megatron.core.transformer.moe.ops.paged_stash": "the paged stash of experts (megatron-core 0.19)",
}

NAMES = ("triton", "triton.language", "triton.language.extra.libdevice", "triton.runtime", "triton.runtime.driver")
"""Modules that have a stand-in."""


def stand_in_for_triton(_context: PatchContext) -> Installed:
    """Let Megatron and mcore-bridge be imported without triton."""
    return stand_in_during_imports(CONCERNED)


def stand_in_during_imports(concerned: Mapping[str, str]) -> Installed:
    """Give some modules a stand-in for triton while they are imported, unless triton is installed.

    Args:
        concerned: Modules or packages that get the stand-in, each with the purpose of its kernels.
    """
    if importlib.util.find_spec("triton") is not None:
        return Installed(lambda: None, "not needed: triton is installed")
    return show_during_import(lambda user: _modules(user, concerned))


def _modules(user: str, concerned: Mapping[str, str]) -> Mapping[str, ModuleType]:
    """Make the stand-ins for a module; an empty mapping if the module is not in ``concerned``."""
    use = next((use for name, use in concerned.items() if f"{user}.".startswith(f"{name}.")), None)
    return {} if use is None else {name: _StandInModule(name, user, use) for name in NAMES}


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
