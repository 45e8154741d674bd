"""Rules about scopes: process-global state of a device that exists while a micro-batch runs."""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch

from anytron.sequences import scopes
from anytron_conformance.micro_batches import Scene, micro_batch
from anytron_conformance.rules import Broken, rule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from anytron.sequences.scopes import ScopeFactory
    from anytron_conformance.rules import Case
    from anytron_conformance.subject import Subject

FIRST, SECOND = (2, 1), (3, 1, 2)
CASES = [Scene(sequence_format, FIRST).case for sequence_format in ("thd", "bshd")]
PLAIN = (type(None), bool, int, float, str, bytes, list, tuple, torch.Tensor)


@rule(
    "scopes-restore",
    "sequences",
    "Leaving a micro-batch's scope, after an error too, puts back the state that was there before it was entered.",
    cases=CASES,
)
def scopes_restore(subject: Subject, case: Case) -> None:
    """Variables of the platform's modules, the environment and torch's settings are compared before and after a scope.

    State that remains would affect the next micro-batch: wrong lengths, or a mask of another shape.
    """
    before, factory = _scopes(subject, case.values.format)
    _enter(before)  # what is made once is there now
    _raise_in(before)
    _compare(subject, "Leaving a scope leaves state behind.", lambda: _enter(factory))
    _compare(subject, "An error that leaves a scope leaves state behind.", lambda: _raise_in(factory))


@rule(
    "scopes-nest",
    "sequences",
    "A scope may be entered inside of itself, inside of another micro-batch's scope, and on another thread.",
    cases=CASES,
)
def scopes_nest(subject: Subject, case: Case) -> None:
    """Recomputation enters a scope again, on autograd's thread, while another one may be open.

    After the inner scope has been left, the state is that of the outer one, not that of no scope at all.
    """
    outer, inner = _scopes(subject, case.values.format)
    _enter(outer)
    _enter(inner)
    with scopes.enter(outer):
        _compare(subject, "Leaving a scope inside of itself changes the state.", lambda: _enter(outer))
        _compare(subject, "Leaving another micro-batch's scope changes the state.", lambda: _enter(inner))
        _compare(subject, "An error in an inner scope changes the state.", lambda: _raise_in(inner))
    found: list[BaseException] = []

    def on_a_thread() -> None:
        try:
            _enter(inner)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            found.append(error)

    thread = threading.Thread(target=on_a_thread)
    thread.start()
    thread.join()
    if found:
        raise Broken("A scope cannot be entered on another thread.", f"{type(found[0]).__name__}: {found[0]}")


def _scopes(subject: Subject, sequence_format: Any) -> tuple[ScopeFactory | None, ScopeFactory | None]:
    """The scopes of two micro-batches."""
    first, second = (micro_batch(subject, Scene(sequence_format, lengths)) for lengths in (FIRST, SECOND))
    return first.scope, second.scope


def _enter(factory: ScopeFactory | None) -> None:
    with scopes.enter(factory):
        pass


def _raise_in(factory: ScopeFactory | None) -> None:
    with contextlib.suppress(ZeroDivisionError), scopes.enter(factory):
        raise ZeroDivisionError


def _compare(subject: Subject, what: str, action: Callable[[], None]) -> None:
    before = dict(_state(subject))
    action()
    after = dict(_state(subject))
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if changed:
        name = min(changed)
        raise Broken(what, f"{name} was {before.get(name)} and is {after.get(name)}")


def _state(subject: Subject) -> Iterator[tuple[str, str]]:
    """All values of simple types that a scope could set, as text by name."""
    own = {one.__module__.partition(".")[0] for one in type(subject.platform).__mro__}
    packages = (own | set(subject.platform.device_packages)) - {"abc", "anytron", "builtins", "torch"}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in packages:
            yield from _plain(name, vars(module))
    yield "os.environ", repr(sorted(os.environ.items()))
    yield "torch.is_grad_enabled()", repr(torch.is_grad_enabled())
    yield "torch.get_default_dtype()", repr(torch.get_default_dtype())
    yield "the current device", repr(subject.runtime.current_device())
    yield "the random state", repr(subject.runtime.get_rng_state().sum().item())


def _plain(owner: str, names: dict[str, Any], depth: int = 1) -> Iterator[tuple[str, str]]:
    for name, value in list(names.items()):
        here = f"{owner}.{name}"
        if name.startswith("__"):
            continue
        if isinstance(value, contextvars.ContextVar):
            yield here, _text(value.get(None))
        elif isinstance(value, PLAIN):
            yield here, _text(value)
        elif depth and isinstance(value, type) and value.__module__.partition(".")[0] == owner.partition(".")[0]:
            yield from _plain(here, dict(vars(value)), depth - 1)


def _text(value: Any) -> str:
    return repr(value.tolist()) if isinstance(value, torch.Tensor) else repr(value)
