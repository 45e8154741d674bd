"""The page of public names is current, and nothing on it is without words."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from enum import Enum

import pytest

from anytron import DeviceRuntime, Platform
from anytron.device.hooks.document import types_of
from anytron.device.hooks.registry import specifications
from anytron.kernels.contract import KernelName, KernelSpec
from anytron.kernels.fused import default_kernel
from anytron.public import MODULES
from anytron.public.document import Named, describe, names
from anytron.sequences import ModelInputs
from tests.house import ROOT

PAGE = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
NAMES = {one.name: one for module in MODULES for one in names(module)}


def section(name):
    heading = f"`{name}`" if name.startswith("_") else name
    return PAGE.partition(f"### {heading}\n")[2].partition("\n### ")[0].partition("\n## ")[0]


def test_the_page_is_up_to_date(tmp_path):
    """In a process of its own: it imports Megatron."""
    page = tmp_path / "api.md"
    command = [sys.executable, "-W", "ignore", "-m", "anytron.public.document", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert page.read_text(encoding="utf-8") == PAGE, "run: python -m anytron.public.document docs/reference/api.md"


def test_no_two_public_names_are_one_word():
    found = [one.name.lower() for module in MODULES for one in names(module)]
    assert sorted(found) == sorted(set(found)), "the page links to a name by its word"


@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_words_and_is_where_the_page_says(name):
    line, text = re.search(
        r"^```python\n(from \S+ import \w+)\n(?:.*?\n)?```\n(.*)", section(name), re.DOTALL | re.MULTILINE
    ).groups()
    assert line == f"from {NAMES[name].module} import {name}"
    assert re.search(r"\w+ \w+", text), "it has no docstring"


def test_every_type_that_hooks_name_is_public():
    assert [name for hook in specifications().values() for name in types_of(hook) if name not in NAMES] == []


PLUGINS_TYPES = [
    one
    for module in ("anytron", "anytron.kernels", "anytron.sequences")
    for one in names(module)
    if one.name not in ("RunConfig", "Section", "__version__", "hookimpl", "default_run", "hooks_of", "Ledger")
]


@pytest.mark.parametrize("one", PLUGINS_TYPES, ids=lambda one: one.name)
def test_every_field_has_a_meaning(one):
    value, text = one.value, section(one.name)
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            assert re.search(rf"^\| `{field.name}` \| `.*` \| .{{2,}} \|$", text, re.MULTILINE), field.name
    if inspect.isclass(value) and issubclass(value, Enum):
        assert all(f"- `{member.name}` = `{member.value}`" in text for member in value)


def test_what_a_platform_and_its_runtime_must_define_is_marked():
    for value in (Platform, DeviceRuntime):
        text = section(value.__name__)
        marked = re.findall(r"^- `(\w+)\(.*A subclass must define it\.$", text, re.MULTILINE)
        assert set(marked) == value.__abstractmethods__ != set()
    assert "- `device_type`: `torch.device` type" in section("DeviceRuntime")
    assert "- `communication_backend`: " in section("DeviceRuntime")
    assert "- `api_version`: " in section("Platform")


def test_a_name_s_own_words_are_there():
    """One of each form: a field with its default, a method, a protocol's argument, an alias, a member, a function."""
    assert "| `scope` | `ScopeFactory \\| None = None` | Factory of a context manager" in section("ModelInputs")
    assert "- `pack(values: Tensor, fill: float | bool = 0) -> Tensor`: Arrange flat" in section("SequenceLayout")
    assert "- `hidden`: `[N, H]`" in section("LogProbKernel")
    assert "ScopeFactory = Callable[[], AbstractContextManager[None]]" in section("ScopeFactory")
    assert "- `FULL_4D` = `full-4d`: bool `[B, 1, C, S]`" in section("MaskKind")
    assert "enter(factory: ScopeFactory | None) -> Iterator[None]" in section("enter")
    assert {field.name for field in dataclasses.fields(ModelInputs)} == set(
        re.findall(r"^\| `(\w+)` \|", section("ModelInputs"), re.MULTILINE)
    )


def test_every_link_of_the_page_has_its_heading():
    headings = {
        re.sub(r"[.\s]", lambda found: "-" if found[0] == " " else "", line.strip("# `").lower())
        for line in PAGE.splitlines()
        if line.startswith("#")
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) - headings == set()


@pytest.mark.parametrize("name", KernelName)
def test_every_fused_kernel_is_described_as_it_is_called(name):
    text = describe(Named(name.value, "anytron.kernels.fused"))
    function = default_kernel(name, KernelSpec("cpu"))
    assert importlib.import_module("anytron.kernels.fused").__dict__[name.value] is function, "as the page says"
    arguments = ", ".join(inspect.signature(function).parameters)
    written = text.partition("(")[2].partition(") ->")[0].replace("*, ", "")
    assert re.sub(r": [^,\[]+(\[[^\]]*\])?( \| None)?", "", written) == arguments


def test_the_options_of_fused_kernels_are_those_that_backends_give():
    given = {}
    for path in (ROOT / "backends").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "fused" and call.args:
                name = getattr(call.args[0], "attr", None)
                if name is not None:
                    given.setdefault(KernelName[name].value, set()).update(one.arg for one in call.keywords)
    said = next(line for line in section("KernelSpec").splitlines() if line.startswith("| `options`"))
    assert {name for name, keys in given.items() if keys} == {"rms_norm", "layer_norm"}
    for name in ("rms_norm", "layer_norm"):
        assert f"`{name}`" in said
        assert all(f"`{key}`" in said for key in given[name]), given[name]
