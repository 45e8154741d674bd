"""Nothing about a hook is missing: documentation, facade method, contract test, implementation."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from anytron.hooks import document
from anytron.hooks.facade import Hooks
from anytron.hooks.registry import spec_arguments, specifications

ROOT = Path(__file__).parents[3]


def test_the_reference_page_is_up_to_date():
    page = ROOT / "docs" / "reference" / "hooks.md"
    assert page.read_text(encoding="utf-8") == document.render(), f"run: python -m anytron.hooks.document {page}"


@pytest.mark.parametrize("hook", specifications())
def test_every_hook_has_a_facade_method_with_its_arguments(hook):
    arguments = list(inspect.signature(getattr(Hooks, hook)).parameters)[1:]
    assert tuple(arguments[: len(spec_arguments(hook))]) == spec_arguments(hook)


@pytest.mark.parametrize("hook", specifications())
def test_every_hook_has_a_contract_test(hook):
    source = (Path(__file__).parent / "test_contract.py").read_text(encoding="utf-8")
    assert re.search(rf"^def test_{hook}_", source, re.MULTILINE)


@pytest.mark.parametrize("hook", specifications())
def test_every_hook_is_documented_and_typed(hook):
    function = specifications()[hook]
    assert "Called: " in inspect.getdoc(function)
    assert "Returns: " in inspect.getdoc(function)
    signature = inspect.signature(function)
    assert inspect.Signature.empty not in [
        signature.return_annotation,
        *(one.annotation for one in signature.parameters.values()),
    ]


@pytest.mark.parametrize("hook", specifications())
def test_every_hook_has_a_caller(hook):
    """A hook without a caller is a promise that nobody keeps."""
    callers = [
        path
        for folder in ("core", "backends")
        for path in (ROOT / folder).rglob("*.py")
        if "hooks" not in path.parts and re.search(rf"\.{hook}\(", path.read_text(encoding="utf-8"))
    ]
    assert callers
