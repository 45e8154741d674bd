"""The rules of the house: imports go downwards, no device words outside of plugins, importing is light."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "anytron"
BACKENDS = ROOT / "backends"
BACKEND_NAMES = ("anytron_megatron", "anytron_rollout", "anytron_ray")
PLATFORM_NAMES = ("anytron_cpu", "anytron_cuda", "anytron_ascend")
HEAVY = ("megatron", "torch_npu", "mindspeed", "flash_attn", "transformer_engine", "ray", "transformers")

# Modules that are imported before torch may be, and what a plugin's module imports.
LIGHT = (
    "anytron",
    "anytron.config.schema",
    "anytron.errors",
    "anytron.hooks.defaults",
    "anytron.hooks.facade",
    "anytron.hooks.markers",
    "anytron.hooks.specs",
    "anytron.hooks.types",
    "anytron.masks",
    "anytron.platform",
    "anytron.plugins",
    "anytron.cli.main",
    "anytron_cpu",
)


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
    assert imported(path).isdisjoint({*BACKEND_NAMES, *PLATFORM_NAMES})
    assert imported(path, module_level_only=True).isdisjoint({*HEAVY, "mcore_bridge"})


@pytest.mark.parametrize("path", sources(BACKENDS), ids=lambda path: str(path.relative_to(ROOT)))
def test_backends_import_no_platform(path):
    assert imported(path).isdisjoint({*PLATFORM_NAMES, "torch_npu", "mindspeed"})


@pytest.mark.parametrize("path", [*sources(CORE), *sources(BACKENDS)], ids=lambda path: str(path.relative_to(ROOT)))
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


@pytest.mark.parametrize("path", [*sources(CORE), *sources(BACKENDS)], ids=lambda path: str(path.relative_to(ROOT)))
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
