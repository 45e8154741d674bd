"""Every text in the sources that tells a user which key of the configuration to change."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import yaml
from pydantic import TypeAdapter, ValidationError

from anytron.config.options import section_model
from anytron.config.schema import RunConfig
from tests.docs.error_page import texts
from tests.house import PACKAGES, ROOT, modules

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic.fields import FieldInfo

SECTIONS = "|".join(RunConfig.model_fields)
KEY = re.compile(rf"(?<![\w./])((?:{SECTIONS})(?:\.[a-z]\w*|\[\])*)(?:=(\{{[^}}]*\}}|\[[^\]]*\]|[^\s,;:)'\"\u2039]+))?")
ASKS = re.compile(
    r"\b(?:set|raise|lower|try|change|leave|take|choose|check|correct|give|shorten|split|skip|share|train|name)\b",
    re.IGNORECASE,
)
"""What a remedy begins with, if it does not give the key its value."""
OPEN = re.compile(r"(?:\w+\.)*options\.|model\.config\.")
"""Below these lie keys that plugins, sources and engines know."""


OTHERS = ("anytron_verl", "anytron_swift")
"""They live in other trainers, and speak of the keys of those."""


@dataclass(frozen=True, order=True)
class Remedy:
    """A key that a text tells to change.

    Attributes:
        file: Of the sources, relative to the repository.
        key: Dotted; ``*`` stands for a place in a list.
        value: What it is to be set to, as it would be typed; empty if the text names none.
        text: What is said.
    """

    file: str
    key: str
    value: str
    text: str


def remedies_of(text: str, file: str) -> Iterator[Remedy]:
    """Find the keys that a text tells to change: prose with a request, or with a key and its value."""
    return (one for one in mentions_of(text, file) if one.value or ASKS.search(one.text))


def mentions_of(text: str, file: str) -> Iterator[Remedy]:
    """Find all keys in prose, whatever it says of them."""
    if " " not in text.strip():
        return
    said = " ".join(text.split())
    for found in KEY.finditer(said):
        key, value = found[1].replace("[]", ".*"), (found[2] or "").rstrip(".")
        if "." in key or value:  # "the model", "data", "executor" are words, too
            yield Remedy(file, key, value, said)


def remedies() -> tuple[Remedy, ...]:
    """Return all remedies of the sources. Docstrings and the help of commands ask for nothing."""
    return tuple(one for one in mentions() if one.value or ASKS.search(one.text))


@functools.cache
def mentions() -> tuple[Remedy, ...]:
    """Return every key in a text of the sources, besides docstrings and the help of commands."""
    found = set()
    for package in PACKAGES:
        for path in modules(package).values() if package not in OTHERS else ():
            if path.name == "document.py":  # writes a page
                continue
            file = str(path.relative_to(ROOT))
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in said_in(tree):
                for text in texts(node):
                    if not text.startswith("# "):  # the head of a page
                        found.update(mentions_of(text, file))
    return tuple(sorted(found))


def said_in(node: ast.AST) -> Iterator[ast.expr]:
    """The outermost expressions of a tree that are text, without docstrings."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        if isinstance(child, ast.JoinedStr) or (isinstance(child, ast.Constant) and isinstance(child.value, str)):
            yield child
        else:
            yield from said_in(child)


def exists(key: str) -> bool:
    """Whether the configuration has a key."""
    if OPEN.match(key):
        return True
    model: type | None = RunConfig
    for part in key.removesuffix(".*").split("."):
        if part == "*":
            continue
        fields = {} if model is None else {field.alias or name: field for name, field in model.model_fields.items()}
        if part not in fields:
            return False
        model = section_model(fields[part].annotation)
    return True


def refusal(key: str, value: str) -> str:
    """Why the configuration does not take a value, as it is typed; empty if it does, or if more must be known."""
    field = _field(key)
    if field is None or value.isupper():  # a key of an engine's, or a placeholder
        return ""
    try:
        TypeAdapter(Annotated[field.annotation, field]).validate_python(yaml.safe_load(value))
    except ValidationError as error:
        return str(error)
    return ""


def _field(key: str) -> FieldInfo | None:
    """What the schema says of a key; None for one that lies below an engine's options."""
    model, field = RunConfig, None
    for part in key.split("."):
        if part == "*":
            continue
        if model is None:
            return None
        field = {one.alias or name: one for name, one in model.model_fields.items()}.get(part)
        model = None if field is None else section_model(field.annotation)
    return field
