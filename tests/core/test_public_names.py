"""Plugins, the sample platform, what the scaffold writes and the examples import public names only (anytron.public)."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from anytron.base.lazy import homes
from anytron.public import MODULES
from tests.house import ROOT

FOLDERS = (
    "core/anytron/cli/scaffold/template",
    "examples",
    "plugins/accelerator/anytron_accelerator",
    "plugins/cpu/anytron_cpu",
    "plugins/cuda/anytron_cuda",
    "plugins/ascend/anytron_ascend",
    "plugins/verl/anytron_verl",
    "plugins/swift/anytron_swift",
)
PAGES = ("docs/how-to", "docs/explanation", "docs/tutorial", *FOLDERS, "plugins/cuda", "plugins/ascend", "plugins/verl")
OURS = {"anytron", *(path.name for path in (ROOT / "backends").iterdir() if path.is_dir())}
LAZY = [
    name
    for name in MODULES
    if "else:\n\n    def __getattr__" in Path(importlib.import_module(name).__file__).read_text()
]


def private(path: Path, source: str | None = None) -> list[str]:
    """Each use of a private name in a file: its line, and the name. Imports inside of functions count."""
    tree, found, modules = ast.parse(source or path.read_text(encoding="utf-8")), [], {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in OURS:
                    modules[alias.asname or alias.name] = alias.name
                    found += [f"{path}:{node.lineno} {alias.name}"] if alias.name not in MODULES else []
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OURS and not node.level:
            for alias in node.names:
                if f"{node.module}.{alias.name}" in MODULES:
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                elif not public(node.module, alias.name):
                    found.append(f"{path}:{node.lineno} {node.module}.{alias.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (module := modules.get(ast.unparse(node.value))):
            inner = f"{module}.{node.attr}" in MODULES
            found += (
                [f"{path}:{node.lineno} {module}.{node.attr}"] if not inner and not public(module, node.attr) else []
            )
    return found


def public(module: str, name: str) -> bool:
    return module in MODULES and name in importlib.import_module(module).__all__


@pytest.mark.parametrize("folder", FOLDERS)
def test_other_packages_import_public_names_only(folder):
    files = [path for path in (ROOT / folder).rglob("*.py") if "build" not in path.parts]
    assert files
    assert [use for path in files for use in private(path)] == []


def imports_of(page: Path) -> str:
    """The imports in a page of Markdown, each on its line."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return "\n".join(line.strip() if re.match(r"\s*(from|import) anytron", line) else "" for line in lines)


def test_pages_import_public_names_only():
    pages = [path for folder in PAGES for path in (ROOT / folder).rglob("*.md")]
    found = {path: imports_of(path) for path in [*pages, ROOT / "README.md"]}
    assert sum(bool(source.strip()) for source in found.values()) >= 10
    assert [use for path, source in found.items() if source.strip() for use in private(path, source)] == []


def test_a_private_name_in_a_page_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\ndef f():\n    from anytron.base.errors import EngineError\n```\n", encoding="utf-8")
    assert private(page, imports_of(page)) == [f"{page}:3 anytron.base.errors.EngineError"]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("from anytron.device.patches import Patch", "anytron.device.patches.Patch"),
        ("import anytron.device.stack", "anytron.device.stack"),
        ("from anytron import device", "anytron.device"),
        ("from anytron.kernels.contract import KernelName as Name", "anytron.kernels.contract.KernelName"),
        ("from anytron_megatron.own_trainer import join", "anytron_megatron.own_trainer.join"),
        ("from anytron.sequences import scopes; scopes.parts", "anytron.sequences.scopes.parts"),
        ("import anytron; anytron.run", "anytron.run"),
    ],
)
def test_a_private_name_is_found_with_its_line_inside_of_a_function_too(line, named, tmp_path):
    twin = tmp_path / "runtime.py"
    shutil.copy(ROOT / "plugins/cpu/anytron_cpu/runtime.py", twin)
    assert private(twin) == []
    lines = len(twin.read_text(encoding="utf-8").splitlines())
    with twin.open("a", encoding="utf-8") as file:
        file.write(f"\ndef sabotage():\n    {line}\n")
    assert private(twin) == [f"{twin}:{lines + 3} {named}"]


@pytest.mark.parametrize("module", LAZY)
def test_a_public_module_imports_for_type_checkers_what_it_lists(module):
    found = importlib.import_module(module)
    assert set(found.__all__) == homes(Path(found.__file__)).keys() - {"TYPE_CHECKING", "find"}
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        found.nothing  # noqa: B018


def test_most_public_modules_are_lazy():
    assert len(LAZY) >= 10


def test_importing_anytron_imports_nothing_and_the_others_no_torch():
    program = f"""
import sys
before = set(sys.modules)
import anytron
print(sorted(sys.modules.keys() - before))
import importlib
for name in {LAZY!r}:
    importlib.import_module(name)
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["['anytron']", "False"]
