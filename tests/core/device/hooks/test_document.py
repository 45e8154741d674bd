"""Nothing about a hook is missing: documentation, facade method, contract test, implementation."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from enum import Enum
from pathlib import Path

import pytest
from anytron.device.hooks.document_types import describe_kernel, reachable, types_in

from anytron.device.hooks import document, specs
from anytron.device.hooks.dispatch import WAYS
from anytron.device.hooks.facade import Hooks
from anytron.device.hooks.registry import specifications
from anytron.device.platform import Platform
from anytron.device.runtime import DeviceRuntime
from anytron.kernels.contract import KernelName, KernelSpec
from anytron.kernels.fused import default_kernel
from anytron.sequences.inputs import ModelInputs

ROOT = Path(__file__).parents[4]


def test_the_reference_page_is_up_to_date():
    page = ROOT / "docs" / "reference" / "hooks.md"
    assert page.read_text(encoding="utf-8") == document.render(), f"run: python -m anytron.device.hooks.document {page}"


SIGNATURES = [str(one) for hook in specifications().values() for one in hook.function.__annotations__.values()]
TYPES = {one.name: one for one in reachable(types_in(SIGNATURES, specs))}
PAGE = document.render()


def section(name):
    return PAGE.partition(f"### {name}\n")[2].partition("\n### ")[0]


def test_types_are_found_through_hooks_and_through_each_other():
    assert TYPES.keys() >= {"LayoutConstraints", "AttnMask", "MaskKind", "Polarity", "ModelInputs", "SequenceLayout"}
    assert TYPES.keys() >= {"Patch", "Phase", "Installed", "AttentionSpec", "AttentionCall", "DeviceRuntime", "Probe"}
    assert TYPES["ModelInputs"].module == "anytron.sequences.inputs"


@pytest.mark.parametrize("name", TYPES)
def test_every_type_is_where_the_page_says(name):
    (line,) = re.findall(r"^from .* import \w+$", section(name), re.MULTILINE)
    found = {}
    exec(line, found)
    assert found[name] is TYPES[name].value


@pytest.mark.parametrize("name", TYPES)
def test_every_field_has_a_meaning(name):
    value = TYPES[name].value
    if not inspect.isclass(value):
        return
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            assert re.search(rf"^\| `{field.name}` \| `.*` \| .{{2,}} \|$", section(name), re.MULTILINE), field.name
    if issubclass(value, Enum):
        assert all(f"- `{member.name}` = `{member.value}`" in section(name) for member in value)


def test_what_a_platform_and_its_runtime_must_define_is_marked():
    for value in (Platform, DeviceRuntime):
        text = section(value.__name__)
        marked = re.findall(r"^- `(\w+)\(.*A subclass must define it\.$", text, re.MULTILINE)
        assert set(marked) == value.__abstractmethods__ != set()
    assert "- `device_type`: `torch.device` type" in section("DeviceRuntime")
    assert "- `communication_backend`: " in section("DeviceRuntime")
    assert "- `api_version`: " in section("Platform")


def test_a_type_s_own_words_are_there():
    """One of each form: a field with its default, a method, a protocol's argument, an alias, a member's docstring."""
    assert "| `scope` | `ScopeFactory \\| None = None` | Makes a context manager" in section("ModelInputs")
    assert "- `pack(values: Tensor, fill: float | bool = 0) -> Tensor`: Arrange flat" in section("SequenceLayout")
    assert "- `hidden`: `[N, H]`" in section("LogProbKernel")
    assert "ScopeFactory = Callable[[], AbstractContextManager[None]]" in section("ScopeFactory")
    assert "- `FULL_4D` = `full-4d`: bool `[B, 1, C, S]`" in section("MaskKind")
    assert {field.name for field in dataclasses.fields(ModelInputs)} == set(
        re.findall(r"^\| `(\w+)` \|", section("ModelInputs"), re.MULTILINE)
    )


def test_every_link_of_the_page_has_its_heading():
    headings = {line.lstrip("# ").lower().replace(" ", "-") for line in PAGE.splitlines() if line.startswith("#")}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) - headings == set()


@pytest.mark.parametrize("name", KernelName)
def test_every_fused_kernel_is_described_as_it_is_called(name):
    text = describe_kernel(name)
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
