"""Call hooks in one of four ways, trace the calls, and check the answers.

Each way turns the plugins' implementations of a hook into one callable. Every answer comes with the name of its plugin,
so that the facade can check the answer and name a plugin that broke the contract.

``ANYTRON_TRACE_HOOKS=1`` prints every call to stderr, one line per implementation that was asked::

    anytron hook build_attn_mask <- cpu: (MaskRequest(format='thd', ...)) = None
    anytron hook build_attn_mask <- neutral-default: (MaskRequest(format='thd', ...)) = AttnMask(kind=none, ...)
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from anytron.base.errors import HookContractError, PluginError
from anytron.device.hooks.registry import Call, Member, Precedence

if TYPE_CHECKING:
    from anytron.device.hooks.specs import Kind
    from anytron.sequences.layout import ModelInputs

TRACE_VARIABLE = "ANYTRON_TRACE_HOOKS"
_LONGEST = 160
"""Characters of an argument or a result in a trace."""
_PREPROCESS = "preprocess_sequences"
_FRESH_SCOPE = "a scope must be a function without arguments that makes a new context manager at each call"


class Implementation(NamedTuple):
    """One plugin's implementation of a hook."""

    plugin: str
    call: Call


def in_order(kind: Kind, members: tuple[Member, ...]) -> list[Member]:
    """Sort plugins as they are asked: platform, extensions by name, neutral default; a chain has the platform last."""
    if kind == "chain":
        return sorted(members, key=lambda member: (member.precedence is Precedence.PLATFORM, member.name))
    return sorted(members, key=lambda member: (member.precedence, member.name))


def ask_all(hook: str, implementations: tuple[Implementation, ...]) -> Callable[..., list[tuple[str, Any]]]:
    """Return a function that asks all plugins and returns (plugin, answer) for every answer that is not None."""
    del hook

    def ask(*arguments: Any) -> list[tuple[str, Any]]:
        answers = [(plugin, call(*arguments)) for plugin, call in implementations]
        return [(plugin, answer) for plugin, answer in answers if answer is not None]

    return ask


def ask_first(hook: str, implementations: tuple[Implementation, ...]) -> Callable[..., tuple[str, Any]]:
    """Return a function that returns (plugin, answer) for the first answer that is not None; no answer is an error."""

    def ask(*arguments: Any) -> tuple[str, Any]:
        for plugin, call in implementations:
            answer = call(*arguments)
            if answer is not None:
                return plugin, answer
        raise HookContractError(
            f"No plugin answered {hook}.",
            why="every plugin returned None, and these hooks lack Anytron's default implementation",
            fix="create the hooks with open_session() or hooks_of() of anytron.device.loading, which add the default",
        )

    return ask


def ask_chain(hook: str, implementations: tuple[Implementation, ...]) -> Callable[[Any], Iterator[tuple[str, Any]]]:
    """Return a function that passes each plugin the value that the previous plugin returned.

    The function yields (plugin, value) for each changed value before the next plugin gets it, so that the caller can
    check the value in time.
    """
    del hook

    def ask(value: Any) -> Iterator[tuple[str, Any]]:
        for plugin, call in implementations:
            answer = call(value)
            if answer is not None and answer is not value:
                yield plugin, answer
                value = answer

    return ask


def ask_merged(hook: str, implementations: tuple[Implementation, ...]) -> Callable[..., dict[str, tuple[str, Any]]]:
    """Return a function that merges the plugins' mappings into one: name -> (first plugin that gave the value, value).

    Two plugins that give one name different values are an error.
    """

    def ask(*arguments: Any) -> dict[str, tuple[str, Any]]:
        merged: dict[str, tuple[str, Any]] = {}
        for plugin, call in implementations:
            answer = call(*arguments)
            if answer is None:
                continue
            if not isinstance(answer, Mapping):
                raise broken(hook, plugin, "its result must be a mapping", f"it is a {type(answer).__name__}")
            for name, value in answer.items():
                owner, present = merged.setdefault(name, (plugin, value))
                if present != value:
                    raise PluginError(
                        f"Two plugins disagree on {name}.",
                        where=f"hook {hook}",
                        why=f"'{owner}' gives {present!r}, '{plugin}' gives {value!r}",
                        fix=f"disable a plugin: ANYTRON_DISABLE_PLUGINS={plugin} or ANYTRON_DISABLE_PLUGINS={owner}",
                    )
        return merged

    return ask


WAYS: Mapping[Kind, Callable[[str, tuple[Implementation, ...]], Callable[..., Any]]] = {
    "all": ask_all,
    "first": ask_first,
    "chain": ask_chain,
    "merge": ask_merged,
}


def broken(hook: str, plugin: str, rule: str, why: str) -> HookContractError:
    """Return the error for a plugin whose answer breaks a rule of the hook's contract."""
    return HookContractError(
        f"{hook} of plugin '{plugin}' broke its contract: {rule}.",
        where=f"plugin {plugin}",
        why=why,
        fix=f"correct {hook} in the plugin; docs/reference/hooks.md has its contract",
    )


def check_class(hook: str, plugin: str, answer: object, kind: type) -> None:
    """Raise an error if a plugin's answer is not an instance of ``kind``."""
    if not isinstance(answer, kind):
        raise broken(hook, plugin, f"its result must be a {kind.__name__}", f"it is a {type(answer).__name__}")


def tracing() -> bool:
    """Whether the user asked for a trace of hook calls (``ANYTRON_TRACE_HOOKS``)."""
    return os.environ.get(TRACE_VARIABLE, "0") not in ("", "0")


def traced(hook: str, plugin: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an implementation so that it prints its calls."""

    def call_and_print(*arguments: Any) -> Any:
        asked = f"anytron hook {hook} <- {plugin}: ({', '.join(brief(value) for value in arguments)})"
        try:
            result = call(*arguments)
            if isinstance(result, Iterator):  # a hook written with yield
                result = list(result)
        except BaseException as error:
            print(f"{asked} raised {type(error).__name__}: {error}", file=sys.stderr)
            raise
        print(f"{asked} = {brief(result)}", file=sys.stderr)
        return result

    return call_and_print


def brief(value: Any, depth: int = 0) -> str:
    """Return a short form of an argument or a result, at most 160 characters; of a tensor, its dtype and shape."""
    if isinstance(value, Enum):
        text = str(value.value)
    elif hasattr(value, "dtype") and hasattr(value, "shape"):
        text = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value) if depth == 0 else ()
        inside = ", ".join(f"{field.name}={brief(getattr(value, field.name), depth + 1)}" for field in fields)
        text = f"{type(value).__name__}({inside or '...'})"
    elif isinstance(value, str | int | float | bool | None):
        text = repr(value)
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key}: {brief(item, depth + 1)}" for key, item in value.items()) + "}"
    elif isinstance(value, list | tuple | set | frozenset):
        text = "[" + ", ".join(brief(item, depth + 1) for item in value) + "]"
    else:
        text = getattr(value, "__qualname__", None) or f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


class InputChecks:
    """Check the micro-batches that plugins return (``preprocess_sequences``).

    The values of positions are checked once for each plugin, when it first changes positions, because the check makes
    the device wait; scopes once, when it first changes the scope, because the check calls the plugin's code.
    """

    def __init__(self) -> None:
        self._positions_of: set[str] = set()
        self._scope_of: set[str] = set()

    def __call__(self, plugin: str, before: ModelInputs, after: ModelInputs) -> None:
        """Check a changed micro-batch.

        Args:
            plugin: Name of the plugin that changed it.
            before: The micro-batch that the plugin received.
            after: The micro-batch that it returned.

        Raises:
            HookContractError: ``after`` is not a ModelInputs or has a different layout; ids, labels or positions
                changed shape or dtype; the position of a real token changed; or its scope is not a function that makes
                a new context manager at each call.
        """
        from anytron.sequences.layout import ModelInputs
        from anytron.sequences.scopes import parts

        check_class(_PREPROCESS, plugin, after, ModelInputs)
        if after.layout is not before.layout:
            raise broken(_PREPROCESS, plugin, "the layout must stay the same object", "it returned another layout")
        for name in ("input_ids", "labels", "position_ids"):
            old, new = getattr(before, name), getattr(after, name)
            if old.shape != new.shape or old.dtype != new.dtype:
                why = f"{name} was {old.dtype} {tuple(old.shape)} and became {new.dtype} {tuple(new.shape)}"
                raise broken(_PREPROCESS, plugin, "ids, labels and positions must keep shape and dtype", why)
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
        why = f"position_ids{list(place)} was {was} and became {now}; only positions of padding may change"
        raise broken(_PREPROCESS, plugin, "real tokens must keep their positions", why)


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
        raise _no_factory(plugin, f"it made a {type(first).__name__}, which is not a context manager")
    if first is second:
        why = f"it made the same {type(first).__name__} twice; recomputation enters the scope of a micro-batch again"
        raise _no_factory(plugin, why)


def _no_factory(plugin: str, why: str) -> HookContractError:
    return broken(_PREPROCESS, plugin, _FRESH_SCOPE, why)
