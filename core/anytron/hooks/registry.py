"""Read a plugin's hook implementations and hold them against the specifications.

pluggy gives the markers and finds what is marked. Order and dispatch are ours
(:mod:`anytron.hooks.facade`), because pluggy's are traps for a host whose plugins must not depend on
who was installed first: the plugin registered last answers first, an unknown hook name is accepted,
and an argument with a default value is never passed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import pluggy

from anytron.errors import PluginError, did_you_mean
from anytron.hooks import specs
from anytron.hooks.markers import PROJECT

Call = Callable[..., Any]
"""A hook implementation that takes the specification's arguments, all of them, by position."""


class Standing(IntEnum):
    """Who is asked before whom where the first answer counts."""

    PLATFORM = 0
    EXTENSION = 1
    DEFAULT = 2


@dataclass(frozen=True)
class Member:
    """A plugin whose hooks were found good, ready to be called.

    Attributes:
        name: Who answers, for messages.
        standing: Its place in the order.
        calls: Its implementations by hook name.
    """

    name: str
    standing: Standing
    calls: Mapping[str, Call]


def specifications() -> dict[str, Callable[..., Any]]:
    """The hooks by name, in the order in which :mod:`anytron.hooks.specs` defines them."""
    return {name: value for name, value in vars(specs).items() if hasattr(value, f"{PROJECT}_spec")}


def spec_arguments(hook: str) -> tuple[str, ...]:
    """Names of a hook's arguments, in order."""
    return tuple(inspect.signature(specifications()[hook]).parameters)


def read_member(plugin: object, name: str, standing: Standing) -> Member:
    """Find and check a plugin's hook implementations.

    Args:
        plugin: An object or module with functions marked ``anytron.hookimpl``.
        name: Its name.
        standing: Its place in the order.

    Raises:
        PluginError: A marked function is no hook, asks for an argument that the hook does not have,
            or is a wrapper.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.register(plugin, name)  # without specifications, so that the messages are ours
    calls: dict[str, Call] = {}
    for caller in manager.get_hookcallers(plugin) or []:
        for implementation in caller.get_hookimpls():
            calls[caller.name] = _checked_call(caller.name, implementation, name)
    return Member(name, standing, calls)


def _checked_call(hook: str, implementation: pluggy.HookImpl, plugin: str) -> Call:
    where = f"plugin {plugin}, {_location(implementation.function)}"
    known = specifications()
    if hook not in known:
        raise PluginError(
            f"Plugin '{plugin}' implements a hook that does not exist: {hook}.",
            where=where,
            why="a function marked hookimpl must have the name of a hook",
            fix=did_you_mean(hook, known) or f"the hooks are {', '.join(known)}",
        )
    arguments = spec_arguments(hook)
    unknown = [name for name in implementation.argnames if name not in arguments]
    unpassed = [name for name in implementation.kwargnames if name in arguments]
    if unknown or unpassed:
        raise PluginError(
            f"Plugin '{plugin}' implements {hook} with a wrong signature.",
            where=where,
            why=f"the hook has no argument {', '.join(unknown)}"
            if unknown
            else f"arguments with a default value are never passed: {', '.join(unpassed)}",
            fix=f"use a subset of ({', '.join(arguments)}), without default values",
        )
    if implementation.wrapper or implementation.hookwrapper:
        raise PluginError(
            f"Plugin '{plugin}' wraps {hook}.",
            where=where,
            why="wrappers would hide who answered; hooks are answered, chained or merged",
            fix="return an answer, or None to leave it to the next plugin",
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
