"""The four ways of calling a hook.

Each function makes the call of one hook from the implementations of the plugins. Every answer comes
with the name of its plugin, so that the facade can check it and name who broke the contract.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from anytron.base.errors import HookContractError, PluginError
from anytron.device.hooks.registry import Call, Member, Precedence

if TYPE_CHECKING:
    from anytron.device.hooks.markers import Kind


class Implementation(NamedTuple):
    """One plugin's implementation of a hook."""

    plugin: str
    call: Call


def in_order(kind: Kind, members: tuple[Member, ...]) -> list[Member]:
    """Sort plugins: the platform, extensions by name, the neutral default; in a chain the platform is last."""
    if kind == "chain":
        return sorted(members, key=lambda member: (member.precedence is Precedence.PLATFORM, member.name))
    return sorted(members, key=lambda member: (member.precedence, member.name))


def ask_all(hook: str, implementations: tuple[Implementation, ...]) -> Callable[..., list[tuple[str, Any]]]:
    """Collect every answer that is not None."""
    del hook

    def ask(*arguments: Any) -> list[tuple[str, Any]]:
        answers = [(plugin, call(*arguments)) for plugin, call in implementations]
        return [(plugin, answer) for plugin, answer in answers if answer is not None]

    return ask


def ask_first(hook: str, implementations: tuple[Implementation, ...]) -> Callable[..., tuple[str, Any]]:
    """Stop at the first answer that is not None; that there is none is an error."""

    def ask(*arguments: Any) -> tuple[str, Any]:
        for plugin, call in implementations:
            answer = call(*arguments)
            if answer is not None:
                return plugin, answer
        raise HookContractError(
            f"No plugin answered {hook}.",
            why="every plugin left it to the next one and there is no neutral default among them",
            fix="make the facade with open_session or hooks_of of anytron.device.loading, which add the default",
        )

    return ask


def ask_chain(hook: str, implementations: tuple[Implementation, ...]) -> Callable[[Any], Iterator[tuple[str, Any]]]:
    """Give each plugin what the one before returned.

    Yields each changed value before the next plugin gets it, so that the caller can check it in time.
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
    """Unite mappings; each value comes with the first plugin that gave it. Different values are an error."""

    def ask(*arguments: Any) -> dict[str, tuple[str, Any]]:
        merged: dict[str, tuple[str, Any]] = {}
        for plugin, call in implementations:
            answer = call(*arguments)
            if answer is None:
                continue
            if not isinstance(answer, Mapping):
                raise broken(hook, plugin, "the answer is a mapping", f"it is {type(answer).__name__}")
            for name, value in answer.items():
                owner, present = merged.setdefault(name, (plugin, value))
                if present != value:
                    raise PluginError(
                        f"Two plugins disagree on {name}.",
                        where=f"hook {hook}",
                        why=f"'{owner}' gives {present!r}, '{plugin}' gives {value!r}",
                        fix=f"disable one of them: ANYTRON_DISABLE_PLUGINS={plugin}",
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
    """Make the error of a plugin whose answer breaks a rule of the hook's contract."""
    return HookContractError(
        f"{hook} of plugin '{plugin}' broke its contract: {rule}.", where=f"plugin {plugin}", why=why
    )


def check_class(hook: str, plugin: str, answer: object, kind: type) -> None:
    """Refuse an answer of another class."""
    if not isinstance(answer, kind):
        raise broken(hook, plugin, f"the answer is a {kind.__name__}", f"it is {type(answer).__name__}")
