"""What a platform sets before a run: environment variables, typed options, and patches of third-party code."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, get_args

from anytron.base.components import TRAINING_ENGINES, component_names
from anytron.base.errors import AnytronError
from anytron.device.hooks.types import OWN_TRAINER, PatchContext, ProcessInfo, Role
from anytron.device.loading import hooks_of
from anytron.device.loading.session import validated_options
from anytron.device.patches import Ledger, Outcome, Phase
from anytron.proof.checks import Inapplicable
from anytron_conformance.ranks import Member, on_ranks
from anytron_conformance.rules import Broken, Case, rule

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron.device.patches import Patch
    from anytron_conformance.subject import Subject


PROCESSES = [
    Case(f"{role} {rank} of {size}", ProcessInfo(role, rank, rank, size), size)
    for role in get_args(Role)
    for rank, size in ((0, 1), (0, 2), (1, 2))
]


@rule(
    "environment-is-plain",
    "device",
    "The platform's runtime_env returns strings by name, and the same strings at each call for a process.",
    cases=PROCESSES,
)
def environment_is_plain(subject: Subject, case: Case) -> None:
    """The platform's ``runtime_env`` is called twice for processes of each role. All values must be text.

    A value that changes from call to call (a port, a time) differs between the ranks that must agree on it. Then
    ``configure`` is called with a deterministic run, and ``runtime_env`` once more for the first run: a platform that
    stores the setting would give each process the environment of the run that was configured last.
    """
    hooks, config = hooks_of(subject.platform), subject.source.config()
    first, second = (hooks.runtime_env(case.values, config) for _ in range(2))
    _compare(first, second, "at the second call")
    hooks.remarks(config.model_copy(update={"engine": config.engine.model_copy(update={"deterministic": True})}))
    _compare(first, hooks.runtime_env(case.values, config), "after configure was asked about another run")


def _compare(first: Mapping[str, str], second: Mapping[str, str], when: str) -> None:
    if first != second:
        changed = sorted(name for name in {*first, *second} if first.get(name) != second.get(name))
        raise Broken(f"runtime_env returns other variables {when}.", ", ".join(changed))


@rule(
    "environment-agrees",
    "device",
    "No other installed plugin sets a variable of the platform to another value.",
    cases=PROCESSES,
)
def environment_agrees(subject: Subject, case: Case) -> None:
    """``runtime_env`` of all installed plugins is called, as before the start of a process of a run."""
    subject.hooks.runtime_env(case.values, subject.source.config())


@rule(
    "environment-reaches-ranks",
    "device",
    "A rank has the environment variables that the plugins set for it.",
    limit_s=360.0,
)
def environment_reaches_ranks(subject: Subject, case: Case) -> None:
    """Two ranks are started, and each reads its own variables after the device's libraries were loaded.

    This detects a platform that sets the same variables elsewhere to other values.
    """
    del case
    on_ranks(subject, 2, compare_environment)


def compare_environment(member: Member) -> None:
    """Compare this rank's environment with the variables that the plugins set when the rank started."""
    for name, value in member.subject.session.environment.items():
        if os.environ.get(name) != value:
            raise Broken(f"{name} is not what runtime_env sets.", f"it is {os.environ.get(name)!r}, expected {value!r}")


UNKNOWN = "no_such_option"


def _wrong_options(subject: Subject) -> Iterator[Case]:
    yield Case("no options", {})
    yield Case("an unknown option", {UNKNOWN: 1}, 1)
    model = subject.platform.options_model
    for place, name in enumerate(model.model_fields if model else ()):
        yield Case(f"{name} of a wrong type", {name: {"of": object}}, 2 + place)


@rule(
    "options-are-typed",
    "device",
    "platform.options has defaults, and an unknown name or a value of the wrong type is refused.",
    cases=_wrong_options,
)
def options_are_typed(subject: Subject, case: Case) -> None:
    """The options' model must accept an empty mapping, and refuse an unknown name and, for each option, a wrong type.

    If a misspelt option were ignored, a run would use another setting than its user intends: set `extra="forbid"`.
    """
    try:
        validated_options(subject.platform, case.values)
    except AnytronError as error:
        if not case.values:
            raise Broken("The options have no defaults.", error.why or error.what) from error
        return
    if case.values:
        name = next(iter(case.values))
        raise Broken("Wrong options are accepted.", f"platform.options.{name} = {case.values[name]!r}")


def _training_ranks(subject: Subject) -> Iterator[Case]:
    del subject
    for place, engine in enumerate((OWN_TRAINER, *component_names(TRAINING_ENGINES))):
        yield Case(f"training rank of the engine {engine}", engine, place)


@rule(
    "patches-take-effect",
    "device",
    "Every patch that is applied changes its target, and undoing it restores the target.",
    cases=_training_ranks,
    limit_s=120.0,
)
def patches_take_effect(subject: Subject, case: Case) -> None:
    """The platform's patches of all phases are applied in order, undone, and applied once more.

    A patch that leaves the same objects in its target has no effect. A required patch that fails stops every run. A
    name that stays changed after undoing would change the next engine of the process.
    """
    context = PatchContext(subject.platform, "trainer", subject.hooks, case.values)
    hooks, done = hooks_of(subject.platform), 0
    for _ in range(2):
        ledger = Ledger(context=context)
        before: dict[str, dict[str, int]] = {}
        try:
            for phase in Phase:
                patches = hooks.patch_model(phase, context)
                done += _apply(ledger, phase, patches, before)
        finally:
            ledger.undo()
        for target, objects in before.items():
            if changed := _changed(objects, _objects(target)):
                raise Broken(f"Undoing the patches left {target} changed.", ", ".join(changed))
    if not done:
        raise Inapplicable("the platform has no patches here")


def _apply(ledger: Ledger, phase: Phase, patches: list[Patch], before: dict[str, dict[str, int]]) -> int:
    """Apply the patches of a phase; return how many of them are in effect."""
    loaded = {patch.module for patch in patches if patch.module in sys.modules}
    here = {patch.module: _objects(patch.module) for patch in patches if phase is not Phase.BEFORE_IMPORT}
    here |= {module: _objects(module) for module in loaded}
    before |= {module: objects for module, objects in here.items() if objects and module not in before}
    done = 0
    for record in ledger.apply(phase, patches):
        if record.outcome is Outcome.FAILED:
            raise Broken(f"The patch {record.patch.id} could not be applied.", record.detail)
        if record.outcome is not Outcome.APPLIED:
            continue
        done += 1
        module = record.patch.module
        if here.get(module) and not _changed(here[module], _objects(module)):
            raise Broken(f"The patch {record.patch.id} changes nothing of {record.patch.target}.")
    return done


def _objects(module: str) -> dict[str, int]:
    """The identity of each object of a module and of its classes, by dotted name."""
    if module not in sys.modules:
        return {}
    found: dict[str, int] = {}
    for name, value in list(vars(sys.modules[module]).items()):
        found[name] = _identity(value)
        if isinstance(value, type) and value.__module__ == module:
            found |= {f"{name}.{inner}": _identity(one) for inner, one in list(vars(value).items())}
    return found


def _identity(value: Any) -> int:
    """The object's identity; for numbers and strings, a hash of type and value."""
    return hash((type(value), value)) if isinstance(value, int | float | str) else id(value)


def _changed(one: dict[str, int], other: dict[str, int]) -> list[str]:
    names = {*one, *other}
    return sorted(name for name in names if one.get(name) != other.get(name) and not name.startswith("__"))
