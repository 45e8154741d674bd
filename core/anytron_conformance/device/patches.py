"""The platform's patches of other people's code."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from anytron.base.components import TRAINING_ENGINES, component_names
from anytron.device.hooks.types import OWN_TRAINER, PatchContext
from anytron.device.loading import hooks_of
from anytron.device.patches import Ledger, Outcome, Phase
from anytron.proof.checks import Inapplicable
from anytron_conformance.rules import Broken, Case, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.device.patches import Patch
    from anytron_conformance.subject import Subject


def _cases(subject: Subject) -> Iterator[Case]:
    del subject
    for place, engine in enumerate((OWN_TRAINER, *component_names(TRAINING_ENGINES))):
        yield Case(f"training rank of the engine {engine}", engine, place)


@rule(
    "patches-take-effect",
    "device",
    "Every patch that is applied changes its target, and undoing it gives back what was there.",
    cases=_cases,
    limit_s=120.0,
)
def patches_take_effect(subject: Subject, case: Case) -> None:
    """The platform's patches of all phases are applied in order, undone, and applied once more.

    A patch after which the target holds the same objects does nothing; a required one that fails stops every run;
    a name that stays changed after undoing makes the next engine of the process another one.
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
            if changed := _differences(objects, _objects(target)):
                raise Broken(f"Undoing the patches left {target} changed.", ", ".join(changed))
    if not done:
        raise Inapplicable("the platform has no patches here")


def _apply(ledger: Ledger, phase: Phase, patches: list[Patch], before: dict[str, dict[str, int]]) -> int:
    """Apply the patches of a phase; give the number of those that are in effect."""
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
        if here.get(module) and not _differences(here[module], _objects(module)):
            raise Broken(f"The patch {record.patch.id} changes nothing of {record.patch.target}.")
    return done


def _objects(module: str) -> dict[str, int]:
    """What a module's names, and those of its classes, hold: the identities by dotted name."""
    if module not in sys.modules:
        return {}
    found: dict[str, int] = {}
    for name, value in list(vars(sys.modules[module]).items()):
        found[name] = _identity(value)
        if isinstance(value, type) and value.__module__ == module:
            found |= {f"{name}.{inner}": _identity(one) for inner, one in list(vars(value).items())}
    return found


def _identity(value: Any) -> int:
    """That of the object; of numbers and text, their value's."""
    return hash((type(value), value)) if isinstance(value, int | float | str) else id(value)


def _differences(one: dict[str, int], other: dict[str, int]) -> list[str]:
    names = {*one, *other}
    return sorted(name for name in names if one.get(name) != other.get(name) and not name.startswith("__"))
