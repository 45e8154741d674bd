"""Nothing about a hook is missing: documentation, facade method, contract test, implementation."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from anytron.device.hooks import document
from anytron.device.hooks.dispatch import WAYS
from anytron.device.hooks.facade import Hooks
from anytron.device.hooks.registry import specifications

ROOT = Path(__file__).parents[4]


def test_the_reference_page_is_up_to_date():
    page = ROOT / "docs" / "reference" / "hooks.md"
    assert page.read_text(encoding="utf-8") == document.render(), f"run: python -m anytron.device.hooks.document {page}"


@pytest.mark.parametrize("hook", specifications())
def test_every_hook_has_a_facade_method_with_its_arguments(hook):
    wanted = specifications()[hook].arguments
    arguments = tuple(inspect.signature(getattr(Hooks, hook)).parameters)[1:]
    assert arguments[: len(wanted)] == wanted


@pytest.mark.parametrize("hook", specifications())
def test_every_hook_has_a_contract_test(hook):
    source = (Path(__file__).parent / "test_contract.py").read_text(encoding="utf-8")
    assert re.search(rf"^def test_{hook}_", source, re.MULTILINE)


@pytest.mark.parametrize("hook", specifications())
def test_every_hook_is_documented_and_typed(hook):
    function = specifications()[hook].function
    assert "Called: " in inspect.getdoc(function)
    assert "Returns: " in inspect.getdoc(function)
    signature = inspect.signature(function)
    assert inspect.Signature.empty not in [
        signature.return_annotation,
        *(one.annotation for one in signature.parameters.values()),
    ]


@pytest.mark.parametrize("hook", specifications())
def test_the_page_says_the_kind_by_which_the_facade_calls_it(hook):
    kind = specifications()[hook].kind
    assert kind in WAYS
    section = document.render().partition(f"## {hook}\n")[2].partition("\n## ")[0]
    assert f"**Kind:** {kind}\n" in section


@pytest.mark.parametrize("hook", specifications())
def test_every_hook_has_a_caller(hook):
    """A hook without a caller is a promise that nobody keeps."""
    callers = [
        path
        for folder in ("core", "backends")
        for path in (ROOT / folder).rglob("*.py")
        if "hooks" not in path.relative_to(ROOT).parts and re.search(rf"\.{hook}\(", path.read_text(encoding="utf-8"))
    ]
    assert callers
