"""``platform.options`` are typed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.base.errors import AnytronError
from anytron.device.loading.session import validated_options
from anytron_conformance.rules import Broken, Case, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron_conformance.subject import Subject

UNKNOWN = "no_such_option"


def _cases(subject: Subject) -> Iterator[Case]:
    yield Case("no options", {})
    yield Case("an unknown option", {UNKNOWN: 1}, 1)
    model = subject.platform.options_model
    for place, name in enumerate(model.model_fields if model else ()):
        yield Case(f"{name} of a wrong type", {name: {"of": object}}, 2 + place)


@rule(
    "options-are-typed",
    "device",
    "platform.options has defaults, and an unknown name or a value of the wrong type is refused.",
    cases=_cases,
)
def options_are_typed(subject: Subject, case: Case) -> None:
    """The options' model is asked to validate nothing, an unknown name, and for each option a value of no type of its.

    A misspelt option that is ignored is a run with another setting than the user believes: `extra="forbid"`.
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
