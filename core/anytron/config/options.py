"""Validate the options of an engine or a platform, like every other key, by the pydantic model that it defines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError

from anytron.base.components import ROLLOUT_ENGINES, TRAINING_ENGINES, EngineInfo, component_names, engine_info, nowhere
from anytron.base.errors import did_you_mean
from anytron.config.diagnostics import Diagnostic

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from anytron.base.components import PlaceOf
    from anytron.config.schema import RunConfig


def chosen_engines(engine: str, rollout: str) -> dict[str, EngineInfo]:
    """Load the descriptions of a run's engines; the keys are ``engine.options`` and ``rollout.options``.

    Engines that are not installed are left out: :mod:`anytron.run.preflight` reports them.

    Args:
        engine: ``engine.name``.
        rollout: ``rollout.engine``.
    """
    asked = {
        "engine.options": (TRAINING_ENGINES, engine, "engine.name"),
        "rollout.options": (ROLLOUT_ENGINES, rollout, "rollout.engine"),
    }
    return {
        options: engine_info(group, name, key)
        for options, (group, name, key) in asked.items()
        if name in component_names(group)
    }


def engine_option_diagnostics(config: RunConfig) -> list[Diagnostic]:
    """Check ``engine.options`` and ``rollout.options`` against the options that the engines accept."""
    engines = chosen_engines(config.engine.name, config.rollout.engine)
    given = {"engine.options": config.engine.options, "rollout.options": config.rollout.options}
    return [
        one
        for key, info in engines.items()
        for one in model_diagnostics(info.options_model, given[key], key, info.place_of)
    ]


def model_diagnostics(
    model: type[BaseModel] | None, options: Mapping[str, Any], key: str, place_of: PlaceOf = nowhere
) -> list[Diagnostic]:
    """Check options that the user has written.

    Args:
        model: Pydantic model of the options that are accepted; None = no options are accepted.
        options: The options as the user wrote them.
        key: Key of the options in the configuration.
        place_of: Function that returns where below ``key`` an unknown name belongs, if that is known.
    """
    if model is None:
        why = "unknown key: no options are accepted here"
        return [Diagnostic("error", f"{key}.{name}", why, "remove it") for name in options]
    try:
        model.model_validate(dict(options))
    except ValidationError as error:
        return list(in_words(error, model, key, place_of))
    return []


def in_words(
    error: ValidationError, model: type[BaseModel], key: str = "", place_of: PlaceOf = nowhere
) -> Iterator[Diagnostic]:
    """Convert a pydantic error into diagnostics.

    Args:
        error: The pydantic error.
        model: The model that refused the values.
        key: The configuration key below which the model's keys are; empty = they are at the top level.
        place_of: Function that returns where below ``key`` an unknown name belongs, if that is known.
    """
    for detail in error.errors():
        *section, name = [*key.split("."), *map(str, detail["loc"])] if key else [*map(str, detail["loc"])] or [""]
        where = ".".join([*section, name])
        kind, message = detail["type"], detail["msg"].removeprefix("Value error, ")
        if kind == "extra_forbidden":
            known = known_keys(model, [str(part) for part in detail["loc"][:-1]])
            fix = did_you_mean(name, known, "".join(f"{part}." for part in section))
            if place := place_of(name):
                fix = f"write {'.'.join(filter(None, (key, place)))}"
            why = f"unknown key {name!r}" + (f" in {'.'.join(section)}" if section else "")
            others = f"known keys: {', '.join(known)}" if known else "remove it"
            yield Diagnostic("error", where, why, fix or others)
        elif kind == "missing":
            yield Diagnostic("error", where, "this key is required", f"add the key {name}")
        elif isinstance(detail["input"], dict | list) or kind == "value_error":
            yield Diagnostic("error", where, message)
        else:
            yield Diagnostic("error", where, f"{message}; the value is {detail['input']!r}")


def known_keys(model: type[BaseModel], section: Sequence[str]) -> list[str]:
    """List the keys of a section of a model.

    Args:
        model: The model of the whole configuration.
        section: Path of the section, list positions included; empty = the top.
    """
    for name in section:
        if name in model.model_fields:
            inner = section_model(model.model_fields[name].annotation)
            if inner is None:
                return []
            model = inner
    return [field.alias or name for name, field in model.model_fields.items()]


def section_model(annotation: Any) -> type[BaseModel] | None:
    """Return the section in an annotation, which may be inside a list or an Optional; None if there is none."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None
