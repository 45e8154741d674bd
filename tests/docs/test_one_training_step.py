"""The page that follows a micro-batch through the code names files and definitions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.walk import WALK, walk

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/explanation/one-training-step.md").read_text(encoding="utf-8")
SECTIONS = {section.splitlines()[0]: section for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}
LETTERS = {"B", "T", "R", "C", "V"}
"""Sizes in shapes."""
HOOKS = "core/anytron/device/hooks/specs.py"


def definitions(file):
    """Dotted names of the classes, functions, methods and attributes that a file defines."""

    def names(node, prefix=""):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                yield prefix + child.name
                yield child.name
                yield from names(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
                yield prefix + child.target.id
                yield child.target.id

    return set(names(ast.parse((ROOT / file).read_text(encoding="utf-8"))))


def mentioned(text):
    """Everything in backquotes: files, and names of definitions."""
    quoted = set(re.findall(r"`([\w/.]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)))
    files = {word for word in quoted if word.endswith(".py")}
    return files, quoted - files - LETTERS


@pytest.mark.parametrize("section", SECTIONS)
def test_every_name_of_a_section_stands_in_the_files_that_it_names(section):
    files, names = mentioned(SECTIONS[section])
    assert files, "each section says where to look"
    assert [file for file in sorted(files) if not (ROOT / file).is_file()] == []

    defined = set().union(*(definitions(file) for file in [*files, HOOKS]))

    assert sorted(names - defined) == []


def test_the_picture_names_what_the_sections_explain():
    files = {file for section in SECTIONS.values() for file in mentioned(section)[0]}
    defined = set().union(*map(definitions, files))
    picture = PAGE.split("```")[1]

    names = set(re.findall(r"\b[A-Z][a-z]+[A-Z][\w.]*|\b[a-z]+(?:_[a-z]+)+\b", picture))

    assert len(names) >= 8
    assert sorted(names - defined) == []


@pytest.mark.slow
def test_the_walk_enters_as_few_files_as_the_page_says():
    found = walk()
    assert "enters fewer than 60 files" in PAGE
    assert 40 < len(found[WALK]) < 60
