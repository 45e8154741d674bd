"""A published fault, made again: functions of one process or of all are exchanged while its platform is in use."""

from __future__ import annotations

import re
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from tests.conformance.mutant import Mutant
from tests.conformance.swap import swapped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROLES = ("trainer", "rollout", "driver")
"""Processes: training ranks, rollout replicas, and the process of ``anytron train`` itself."""

ENDS = "the run ends"
"""In place of a rule: the run itself notices the fault, and its error has the words of ``says``."""


class Fault(Mutant):
    """The processor with one published fault.

    A subclass has the entry's name in capitals (``value-scale-forgotten`` is ``ValueScaleForgotten``), and marks each
    function that takes the place of another one with :func:`in_place_of`. It may also break a hook, as any mutant.

    Attributes:
        run: The run in which it changes a number: a key of ``tests.corpus.runs.RUNS``.
        changes_a_run: Whether a run of two steps shows it; otherwise only the rule's own number does.
        rule: The check of ``anytron verify``, or the rule of ``anytron conformance``, that must fail; or :data:`ENDS`.
    """

    run, changes_a_run = "", True

    @classmethod
    def entry(cls) -> str:
        """Return the name of the published entry."""
        return re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()

    @classmethod
    @contextmanager
    def breaks(cls, role: str) -> Iterator[None]:
        """Exchange what the fault exchanges in processes of a role."""
        with ExitStack() as stack:
            for found in vars(cls).values():
                function = found.__func__ if isinstance(found, staticmethod) else found
                for target in getattr(function, "targets", {}).get(role, ()):
                    stack.enter_context(swapped(target, function))
            yield


def in_place_of(*targets: str, role: str = "trainer") -> Callable[[Any], Any]:
    """Return a decorator for a function that takes the place of others, in processes of a role.

    Args:
        targets: ``package.module:name`` or ``package.module:Class.name``; the function gets the original first.
        role: One of :data:`ROLES`.
    """
    assert role in ROLES, role

    def mark(function: Any) -> Any:
        known = getattr(function, "targets", {})
        function.targets = {**known, role: (*known.get(role, ()), *targets)}
        return function

    return mark
