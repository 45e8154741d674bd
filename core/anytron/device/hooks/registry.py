"""Read the specifications, and check a plugin's hook implementations against them.

pluggy marks and finds implementations. Anytron orders and calls them itself (:mod:`anytron.device.hooks.dispatch`),
because with pluggy the result would depend on the order of installation: the plugin that registers
last answers first. pluggy also accepts an unknown hook name, and never passes an argument that has a
default value.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, cast

import pluggy

from anytron.base.errors import PluginError, did_you_mean
from anytron.device.hooks import specs
from anytron.device.hooks.specs import KIND, PROJECT, Kind

Call = Callable[..., Any]
"""A hook implementation that takes the specification's arguments, all of them, by position."""


REMOVED = {
    "rollout_options": "return ConfigEdit('rollout.options.NAME', value, reason, default=True) from configure instead",
    "layout_constraints": "it is a method of anytron.Platform: remove the marker hookimpl; extensions cannot define it",
}
"""Hooks of earlier versions, and what plugins do instead."""


@dataclass(frozen=True)
class HookSpec:
    """A hook, as its specification defines it.

    Attributes:
        name: Name of the hook.
        kind: How the hook is called.
        arguments: Names of the arguments, in order.
        function: The specification in :mod:`anytron.device.hooks.specs`.
    """

    name: str
    kind: Kind
    arguments: tuple[str, ...]
    function: Callable[..., Any]


class Precedence(IntEnum):
    """The order in which plugins are asked for hooks of kind ``first``."""

    PLATFORM = 0
    EXTENSION = 1
    DEFAULT = 2


@dataclass(frozen=True)
class Member:
    """A plugin whose hook implementations passed all checks.

    Attributes:
        name: The plugin's name, for messages.
        precedence: The plugin's place in the order.
        calls: The plugin's hook implementations, by hook name.
    """

    name: str
    precedence: Precedence
    calls: Mapping[str, Call]


@functools.cache
def specifications() -> dict[str, HookSpec]:
    """The hooks by name, in the order in which :mod:`anytron.device.hooks.specs` defines them."""
    return {
        name: HookSpec(name, cast("Kind", getattr(value, KIND)), tuple(inspect.signature(value).parameters), value)
        for name, value in vars(specs).items()
        if hasattr(value, KIND)
    }


def read_member(plugin: object, name: str, precedence: Precedence) -> Member:
    """Find and check a plugin's hook implementations.

    Args:
        plugin: An object or module with functions marked ``anytron.hookimpl``.
        name: Name of the plugin.
        precedence: The plugin's place in the order.

    Raises:
        PluginError: A marked function is not a hook, asks for an argument that the hook does not have,
            or is a wrapper; a function has a hook's name and no marker.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.register(plugin, name)  # without specifications, so that the messages are ours
    calls: dict[str, Call] = {}
    for caller in manager.get_hookcallers(plugin) or []:
        for implementation in caller.get_hookimpls():
            calls[caller.name] = _checked_call(caller.name, implementation, name)
    for hook in specifications().keys() - calls.keys():
        _refuse_unmarked(plugin, hook, name)
    return Member(name, precedence, calls)


def _refuse_unmarked(plugin: object, hook: str, name: str) -> None:
    """Refuse a function that has a hook's name and no marker: it would never be called.

    Only functions of the plugin's own code count. A module may import a function of that name, and a
    class may inherit one from another distribution.

    Raises:
        PluginError: The plugin has a function of that name without the marker.
    """
    found = inspect.getattr_static(plugin, hook, None)
    function = inspect.unwrap(getattr(found, "__func__", found))
    if not inspect.isfunction(function):
        return
    if inspect.ismodule(plugin):
        own = function.__module__ == plugin.__name__
    else:
        own = function.__module__.partition(".")[0] == type(plugin).__module__.partition(".")[0]
    if own:
        raise PluginError(
            f"Plugin '{name}' has a function {hook} without the marker hookimpl.",
            where=f"plugin {name}, {_location(function)}",
            why=f"{hook} is the name of a hook, and an implementation without the marker is never called",
            fix="mark it with @anytron.hookimpl, or give it a different name if it is not meant for the hook",
        )


def _checked_call(hook: str, implementation: pluggy.HookImpl, plugin: str) -> Call:
    where = f"plugin {plugin}, {_location(implementation.function)}"
    known = specifications()
    if hook not in known:
        raise PluginError(
            f"Plugin '{plugin}' implements a hook that does not exist: {hook}.",
            where=where,
            why="a function marked hookimpl must have the name of a hook",
            fix=REMOVED.get(hook) or did_you_mean(hook, known) or f"the hooks are {', '.join(known)}",
        )
    arguments = known[hook].arguments
    unknown = [name for name in implementation.argnames if name not in arguments]
    unpassed = [name for name in implementation.kwargnames if name in arguments]
    if unknown or unpassed:
        raise PluginError(
            f"Plugin '{plugin}' implements {hook} with a wrong signature.",
            where=where,
            why=f"the hook has no argument {', '.join(unknown)}"
            if unknown
            else f"arguments with a default value are never passed: {', '.join(unpassed)}",
            fix=f"take only arguments from ({', '.join(arguments)}), without default values",
        )
    if implementation.wrapper or implementation.hookwrapper:
        raise PluginError(
            f"Plugin '{plugin}' implements {hook} as a wrapper.",
            where=where,
            why="a wrapper would hide which plugin the result comes from",
            fix="mark it with @anytron.hookimpl alone, and return a result, or None to leave it to the next plugin",
        )
    return _by_position(implementation.function, implementation.argnames, arguments)


def _by_position(function: Call, wanted: tuple[str, ...], given: tuple[str, ...]) -> Call:
    """Adapt an implementation that takes a subset of the arguments, or takes them in another order."""
    if wanted == given:
        return function
    positions = [given.index(name) for name in wanted]

    def call(*arguments: Any) -> Any:
        return function(*[arguments[position] for position in positions])

    return call


def _location(function: Call) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)
