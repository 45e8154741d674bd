"""The rules of the house: imports go downwards, no device words outside of plugins, importing is light."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests import house
from tests.house import BEGIN, DRAWN, END, PACKAGES, ROOT, circles, climbing, picture, unlisted

if TYPE_CHECKING:
    from pathlib import Path

CORE = ROOT / "core" / "anytron"
COMMAND = CORE / "cli" / "check_commands.py"
"""``anytron conformance`` imports the kit as it runs."""
TEMPLATE = CORE / "cli" / "scaffold" / "template"
"""Of the packages of new platforms: to the core it is data."""
KIT = ROOT / "core" / "anytron_conformance"
BACKENDS = ROOT / "backends"
BACKEND_NAMES = ("anytron_megatron", "anytron_rollout", "anytron_vllm", "anytron_verifiers", "anytron_ray")
PLATFORM_NAMES = ("anytron_accelerator", "anytron_cpu", "anytron_cuda", "anytron_ascend")
SOURCES = ("core", "backends", "plugins", "tests", "examples", "benchmarks", "docs")
LONGEST = 400
"""Lines of a file."""
HEAVY = ("megatron", "torch_npu", "mindspeed", "flash_attn", "transformer_engine", "ray", "transformers")

# Modules that are imported before torch may be, and what a plugin's module imports.
LIGHT = (
    "anytron",
    "anytron.config.schema",
    "anytron.base.errors",
    "anytron.device.loading.neutral",
    "anytron.device.hooks.facade",
    "anytron.device.hooks.specs",
    "anytron.device.hooks.types",
    "anytron.device.platform",
    "anytron.sequences.masks",
    "anytron.device.loading",
    "anytron.device.runtime",
    "anytron.cli.main",
    "anytron_accelerator",
    "anytron_cpu",
)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_import_goes_to_a_lower_floor_or_stays_in_its_district(package):
    assert unlisted(package) == []
    assert [str(one) for one in climbing(package)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_files_import_each_other_in_a_circle(package):
    assert circles(package) == []


def test_the_floors_are_drawn_in_the_docs():
    drawn = DRAWN.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert drawn.strip() == picture(), "run python -m tests.house --draw"


@pytest.mark.parametrize(
    ("importer", "imported", "named"),
    [
        ("sequences/layout.py", "from anytron.run.trainer.loop import train", "core/anytron/sequences/layout.py:"),
        (
            "base/errors.py",
            "if TYPE_CHECKING:\n    from anytron.config.schema import RunConfig",
            "core/anytron/base/errors.py:",
        ),
    ],
)
def test_an_import_that_climbs_is_named_with_its_line(importer, imported, named, tmp_path, monkeypatch):
    copy = tmp_path / "core" / "anytron"
    shutil.copytree(CORE, copy)
    with (copy / importer).open("a", encoding="utf-8") as file:
        file.write(f"\n{imported}\n")
    monkeypatch.setattr(house, "ROOT", tmp_path)
    monkeypatch.setitem(PACKAGES, "anytron", copy)
    (climb,) = climbing("anytron")
    assert str(climb).startswith(named)
    assert climb.line > 1


def test_no_file_is_longer_than_one_reads():
    found = (path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cpp", ".h"))
    files = [path for path in found if "build" not in path.parts]
    assert len(files) > 1000
    long = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {name: lines for name, lines in long.items() if lines > LONGEST} == {}


ROOM_WITHOUT_MEGATRON = """
import importlib, importlib.abc, pkgutil, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("megatron", "mcore_bridge", "transformer_engine"):
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocker())
room = importlib.import_module("anytron_megatron." + sys.argv[1])
names = [one.name for one in pkgutil.iter_modules(room.__path__, room.__name__ + ".")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


@pytest.mark.parametrize(("room", "files"), [("checks", 8), ("estimate", 4)])
def test_what_is_known_before_a_run_imports_no_megatron(room, files):
    command = [sys.executable, "-c", ROOM_WITHOUT_MEGATRON, room]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= files


def sources(folder: Path) -> list[Path]:
    found = sorted(folder.rglob("*.py"))
    assert found
    return found


def imported(path: Path, *, module_level_only: bool = False) -> set[str]:
    """Names of the modules that a file imports; imports for type checkers only do not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names: set[str] = set()
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        if module_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        pending.extend(ast.iter_child_nodes(node))
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("path", sources(CORE), ids=lambda path: str(path.relative_to(ROOT)))
def test_core_imports_no_backend_no_platform_and_no_engine_at_module_level(path):
    if TEMPLATE in path.parents:
        return
    kit = {KIT.name} if path != COMMAND else set()
    assert imported(path).isdisjoint({*BACKEND_NAMES, *PLATFORM_NAMES, *kit})
    assert imported(path, module_level_only=True).isdisjoint({*HEAVY, KIT.name, "mcore_bridge"})


@pytest.mark.parametrize("path", sources(KIT), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_kit_imports_no_backend_and_no_platform(path):
    assert imported(path).isdisjoint({*BACKEND_NAMES, *PLATFORM_NAMES})


@pytest.mark.parametrize("path", sources(BACKENDS), ids=lambda path: str(path.relative_to(ROOT)))
def test_backends_import_no_platform(path):
    assert imported(path).isdisjoint({*PLATFORM_NAMES, KIT.name, "torch_npu", "mindspeed"})


@pytest.mark.parametrize(
    "path", [*sources(CORE), *sources(KIT), *sources(BACKENDS)], ids=lambda path: str(path.relative_to(ROOT))
)
def test_no_device_words_outside_of_plugins(path):
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"is_npu|is_torch_npu|is_cuda_available", text) == []
    if "redirect" not in path.parts:  # the redirection of torch.cuda has to name what it redirects
        assert re.findall(r"[!=]= *[\"'](?:npu|cuda)[\"']", text) == []
        code = "\n".join(ast.unparse(statement) for statement in _without_docstrings(ast.parse(text)))
        assert re.findall(r"\btorch\.npu\b", code) == []


def _without_docstrings(tree: ast.Module) -> list[ast.stmt]:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [one for one in body if not _is_text(one)] or [ast.Pass()]
    return tree.body


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@pytest.mark.parametrize(
    "path", [*sources(CORE), *sources(KIT), *sources(BACKENDS)], ids=lambda path: str(path.relative_to(ROOT))
)
def test_only_the_facade_calls_hooks(path):
    assert not re.search(r"\b(?:pm|manager)\.hook\b", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("module", LIGHT)
def test_importing_it_brings_in_no_torch(module):
    code = f"import sys, {module}; print([n for n in ('torch', *{HEAVY!r}) if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


BLOCKER = f"""
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocker())
import anytron
from anytron.cli.main import run
sys.argv = ["anytron", "plugins", "list", "--json"]
run()
"""


def test_listing_plugins_needs_none_of_the_heavy_libraries():
    done = subprocess.run([sys.executable, "-c", BLOCKER], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout)
    assert {"cpu": "active", "megatron": "active"}.items() <= {one["name"]: one["state"] for one in reports}.items()
