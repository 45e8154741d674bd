"""The environment variables that the device's libraries need."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, get_args

from anytron.device.hooks.types import ProcessInfo, Role
from anytron.device.loading import hooks_of
from anytron_conformance.ranks import Member, on_ranks
from anytron_conformance.rules import Broken, Case, rule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anytron_conformance.subject import Subject

PROCESSES = [
    Case(f"{role} {rank} of {size}", ProcessInfo(role, rank, rank, size), size)
    for role in get_args(Role)
    for rank, size in ((0, 1), (0, 2), (1, 2))
]


@rule(
    "environment-is-plain",
    "device",
    "runtime_env of the platform gives text by name, the same each time it is asked for one process.",
    cases=PROCESSES,
)
def environment_is_plain(subject: Subject, case: Case) -> None:
    """The platform alone is asked, twice, for processes of each role. Numbers must be written as text.

    A value that changes from call to call (a port, a time) differs between the ranks that must agree on it. Then
    ``configure`` is asked with a deterministic run: a platform that remembers it gives each process the environment
    of whichever run was looked at last.
    """
    hooks, config = hooks_of(subject.platform), subject.source.config()
    first, second = (hooks.runtime_env(case.values, config) for _ in range(2))
    _compare(first, second, "when it is asked for again")
    hooks.remarks(config.model_copy(update={"engine": config.engine.model_copy(update={"deterministic": True})}))
    _compare(first, hooks.runtime_env(case.values, config), "after configure was asked about another run")


def _compare(first: Mapping[str, str], second: Mapping[str, str], when: str) -> None:
    if first != second:
        changed = sorted(name for name in {*first, *second} if first.get(name) != second.get(name))
        raise Broken(f"The environment is another one {when}.", ", ".join(changed))


@rule(
    "environment-agrees",
    "device",
    "No other installed plugin sets a variable of the platform to another value.",
    cases=PROCESSES,
)
def environment_agrees(subject: Subject, case: Case) -> None:
    """All installed plugins are asked together, as before a process of a run is started."""
    subject.hooks.runtime_env(case.values, subject.source.config())


@rule("environment-reaches-ranks", "device", "A rank has the environment that the plugins want for it.", limit_s=360.0)
def environment_reaches_ranks(subject: Subject, case: Case) -> None:
    """Two ranks are started, and each reads its own variables after the device's libraries were loaded.

    A platform that sets the same variables by itself, to other values, is found here.
    """
    del case
    on_ranks(subject, 2, compare_environment)


def compare_environment(member: Member) -> None:
    """Compare this rank's environment with what the plugins wanted when it began: later they keep what they find."""
    for name, value in member.subject.session.environment.items():
        if os.environ.get(name) != value:
            raise Broken(f"{name} is not what runtime_env wants.", f"{os.environ.get(name)!r}, wanted {value!r}")
