"""Scopes for the process-global state that some devices need during a micro-batch.

Some devices need process-global state around a micro-batch's forward pass (MindSpeed's
``set_actual_seq_len``). A :data:`ScopeFactory` makes a *fresh* context manager each time it is
called: the engine enters one around the forward pass, and every checkpointed function captures the
factory and enters another one inside the recomputation, on whatever thread autograd runs it. So a
recomputation of micro-batch i never sees what micro-batch j left behind.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["ScopeFactory", "combine", "enter"]

ScopeFactory = Callable[[], AbstractContextManager[None]]
"""A function without arguments that makes a fresh context manager each time it is called, for example one that
``contextlib.contextmanager`` decorates. Leaving it puts back the state that was there before, also after an error."""

Result = TypeVar("Result")

_current: contextvars.ContextVar[ScopeFactory | None] = contextvars.ContextVar("anytron_scope", default=None)


@dataclass(frozen=True)
class _Combined:
    """Several scopes, entered as one."""

    factories: tuple[ScopeFactory, ...]

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for factory in self.factories:
                stack.enter_context(factory())
            yield


def combine(*factories: ScopeFactory | None) -> ScopeFactory | None:
    """Combine factories into one whose scope enters all their scopes, first to last, and leaves them in reverse.

    ``None`` is skipped; the result is None if nothing else is given.
    """
    present = tuple(factory for factory in factories if factory is not None)
    if len(present) <= 1:
        return present[0] if present else None
    return _Combined(present)


def parts(factory: ScopeFactory | None) -> tuple[ScopeFactory, ...]:
    """Return the factories that :func:`combine` has combined, first to last; any other factory is returned alone."""
    if isinstance(factory, _Combined):
        return tuple(part for combined in factory.factories for part in parts(combined))
    return () if factory is None else (factory,)


@contextlib.contextmanager
def enter(factory: ScopeFactory | None) -> Iterator[None]:
    """Run a micro-batch's forward pass, or its recomputation, inside a fresh scope.

    Within it :func:`current` returns ``factory``, so that nested checkpoints can capture it.
    """
    token = _current.set(factory)
    try:
        if factory is None:
            yield
        else:
            with factory():
                yield
    finally:
        _current.reset(token)


def current() -> ScopeFactory | None:
    """The factory of the micro-batch whose forward pass (or recomputation) is running here; None outside of one."""
    return _current.get()


def rescoped(function: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap a checkpointed function so that its recomputation runs in a scope of the current micro-batch.

    The first run happens in the micro-batch's own scope and is not changed. Every later run, in any pass and on any
    thread, gets a fresh scope of the same factory.
    """
    factory = current()
    if factory is None:
        return function

    @functools.wraps(function)
    def run(*args: object, **kwargs: object) -> Result:
        if current() is factory:
            return function(*args, **kwargs)
        with enter(factory):
            return function(*args, **kwargs)

    return run
