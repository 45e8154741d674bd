"""Write ``docs/reference/config.md`` from the schema of the configuration, and from the engines' options.

Run ``python -m anytron.config.document docs/reference/config.md`` after a change of the schema; a test fails if the
page is not up to date.
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from anytron.base.components import ROLLOUT_ENGINES, TRAINING_ENGINES, component_names, engine_info
from anytron.config.data import SOURCE_OPTIONS
from anytron.config.options import section_model
from anytron.config.schema import RunConfig
from anytron.config.stages import STAGES, StageSection

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic.fields import FieldInfo

HEADING = """# Configuration

<!-- Generated from core/anytron/config/schema.py, the files of sections beside it, and the options of engines by
`python -m anytron.config.document docs/reference/config.md`. -->

A run is one YAML file. Any key can be set on the command line, `anytron train run.yaml section.key=value`,
where the value is YAML and `rewards[0].weight=2` reaches into lists. `${section.key}` refers to another
key. An unknown key is an error. `anytron config show run.yaml` prints what a run would use. If a file
has [`stages`](#stages), commands that work on a single stage need `stage=NAME`.
"""


DISTRIBUTION = "anytron"
"""The reference has the options of this distribution's engines, whatever else is installed."""
ENGINES = {"rollout": ROLLOUT_ENGINES, "engine": TRAINING_ENGINES}
"""Entry-point groups of engines by the section that chooses one."""


def render() -> str:
    """Return the whole reference as Markdown."""
    return "\n".join([HEADING, *_sections()])


def _sections() -> Iterator[str]:
    single = {name: field for name, field in RunConfig.model_fields.items() if section_model(field.annotation) is None}
    yield "## Keys outside of sections\n"
    yield from _table(single, RunConfig)
    for name, field in RunConfig.model_fields.items():
        model = section_model(field.annotation)
        if model is None:
            continue
        yield from _section(name, model, _remark(field))
        if name == "data":
            for given in dict.fromkeys(SOURCE_OPTIONS.values()):
                owners = ", ".join(f"`{source}`" for source, one in SOURCE_OPTIONS.items() if one is given)
                yield from _section("data.options", given, "", f" of {owners}")
        if name in ENGINES:
            for engine in component_names(ENGINES[name], DISTRIBUTION):
                options = engine_info(ENGINES[name], engine, name).options_model
                if options is not None:
                    yield from _section(f"{name}.options", options, "", f" of {engine}")
    yield from _section(STAGES, StageSection, "A list. May be left out.")


def _remark(field: FieldInfo) -> str:
    kind = "A list. " if get_origin(field.annotation) is list else ""
    return f"{kind}{'Required.' if field.is_required() else 'May be left out.'}"


def _section(name: str, model: type[BaseModel], remark: str, owner: str = "") -> Iterator[str]:
    """The table of a section's keys, and after it those of the sections inside."""
    yield f"## {name}{owner}\n"
    yield f"{_text(model.__doc__)} {remark}".rstrip() + "\n"
    yield from _table(model.model_fields, model)
    for key, inner in model.model_fields.items():
        inside = section_model(inner.annotation)
        if inside is not None:
            yield from _section(f"{name}.{key}", inside, _remark(inner), owner)


def _table(fields: Mapping[str, FieldInfo], model: type[BaseModel]) -> Iterator[str]:
    said = meanings(model)
    yield "| key | type | default | |"
    yield "|---|---|---|---|"
    for name, field in fields.items():
        cells = (f"`{field.alias or name}`", _type(field), _default(field), _text(said.get(name)))
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return the descriptions of a model's fields: those in ``Field``, or else the docstrings that follow the fields.

    The docstrings are read here and not by pydantic (``use_attribute_docstrings``), because pydantic would read the
    source of every class of the configuration in every process.
    """
    said: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if kind is not BaseModel and issubclass(kind, BaseModel):
            (definition,) = ast.parse(inspect.getsource(kind)).body
            said |= dict(_documented(definition.body)) if isinstance(definition, ast.ClassDef) else {}
    return said | {name: field.description for name, field in model.model_fields.items() if field.description}


def _documented(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Yield annotated names that a string follows, with that string."""
    for node, after in pairwise(body):
        name, value = getattr(node, "target", None), getattr(getattr(after, "value", None), "value", None)
        if isinstance(node, ast.AnnAssign) and isinstance(name, ast.Name) and isinstance(value, str):
            yield name.id, value


def _text(docstring: str | None) -> str:
    """Join the lines of a docstring; reStructuredText's double backquotes become Markdown's single ones."""
    return " ".join((docstring or "").split()).replace("``", "`")


def _type(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(bound, name):g}"
        for bound in field.metadata
        for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if getattr(bound, name, None) is not None
    ]
    return ", ".join([_name(field.annotation), *bounds])


def _name(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    if origin in (Union, types.UnionType):
        return " or ".join("null" if kind is types.NoneType else _name(kind) for kind in get_args(annotation))
    if origin is list:
        return f"list of {_name(get_args(annotation)[0])}"
    if origin is dict:
        return "mapping"
    if section_model(annotation) is not None:
        return "section"
    names = {str: "text", int: "integer", float: "number", bool: "true or false"}
    return names[annotation]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "null"
    if isinstance(value, BaseModel):
        return "keys below"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
