"""Check what plugins make of a micro-batch (``preprocess_sequences``)."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from anytron.device.hooks.dispatch import broken, check_class

if TYPE_CHECKING:
    from anytron.base.errors import HookContractError
    from anytron.sequences.layout import ModelInputs

_HOOK = "preprocess_sequences"
_FRESH = "a scope is a function without arguments that makes a fresh context manager each time it is called"


class InputChecks:
    """Checks of a plugin's changed inputs.

    What makes the device wait (values of positions) or calls the plugin's code (its scope) is checked once, when the
    plugin first changes it.
    """

    def __init__(self) -> None:
        self._positions_of: set[str] = set()
        self._scope_of: set[str] = set()

    def __call__(self, plugin: str, before: ModelInputs, after: ModelInputs) -> None:
        """Check a changed micro-batch.

        Args:
            plugin: Who changed it.
            before: What the plugin was given.
            after: Its answer.

        Raises:
            HookContractError: It is of another class or has another layout; ids, labels or positions have another shape
                or dtype; a real token has another position; its scope is no factory, or gives one object twice.
        """
        from anytron.sequences.layout import ModelInputs
        from anytron.sequences.scopes import parts

        check_class(_HOOK, plugin, after, ModelInputs)
        if after.layout is not before.layout:
            raise broken(_HOOK, plugin, "the layout stays the same object", "it returned another layout")
        for name in ("input_ids", "labels", "position_ids"):
            old, new = getattr(before, name), getattr(after, name)
            if old.shape != new.shape or old.dtype != new.dtype:
                why = f"{name} was {old.dtype} {tuple(old.shape)} and became {new.dtype} {tuple(new.shape)}"
                raise broken(_HOOK, plugin, "ids, labels and positions keep shape and dtype", why)
        if after.position_ids is not before.position_ids and plugin not in self._positions_of:
            self._positions_of.add(plugin)
            _check_positions(plugin, before, after)
        own = [part for part in parts(after.scope) if part not in parts(before.scope)]
        if own and plugin not in self._scope_of:
            self._scope_of.add(plugin)
            for scope in own:
                _check_scope(plugin, scope)


def _check_positions(plugin: str, before: ModelInputs, after: ModelInputs) -> None:
    layout = before.layout
    # A model that packs rows itself is given the positions of its rows.
    real = layout.valid if layout.valid.shape == before.position_ids.shape[-2:] else layout.taken.valid
    moved = (before.position_ids != after.position_ids) & real
    if bool(moved.any()):
        place = tuple(int(index) for index in moved.nonzero()[0])
        was, now = int(before.position_ids[place]), int(after.position_ids[place])
        why = f"position_ids{list(place)} was {was} and became {now}; only those of padding may change"
        raise broken(_HOOK, plugin, "real tokens keep their positions", why)


def _check_scope(plugin: str, scope: Any) -> None:
    if not callable(scope) or isinstance(scope, AbstractContextManager):
        raise _no_factory(plugin, f"it is a {type(scope).__name__}; return the function that makes it, not its result")
    try:
        inspect.signature(scope).bind()
    except TypeError as error:
        raise _no_factory(plugin, f"it cannot be called without arguments: {error}") from error
    except ValueError:
        pass  # a function written in C does not tell its arguments
    first, second = scope(), scope()
    if not isinstance(first, AbstractContextManager):
        raise _no_factory(plugin, f"it made a {type(first).__name__}")
    if first is second:
        why = f"it made the same {type(first).__name__} twice; recomputation enters the scope of a micro-batch again"
        raise _no_factory(plugin, why)


def _no_factory(plugin: str, why: str) -> HookContractError:
    return broken(_HOOK, plugin, _FRESH, why)
