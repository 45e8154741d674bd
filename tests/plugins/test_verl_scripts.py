"""What a user of verl writes imports nothing of Anytron: verl finds the plugin by itself."""

from __future__ import annotations

import ast
import re

import pytest

from tests.house import ROOT

EXAMPLE = ROOT / "examples" / "verl"
PROGRAMS = ROOT / "plugins" / "verl" / "tests" / "programs"
SCRIPTS = [PROGRAMS / "user.py", PROGRAMS / "recorded.py", *sorted(EXAMPLE.glob("*.py"))]


def imported(source: str) -> set[str]:
    """The packages that a script imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
            found.add(node.value)  # of an import by name
    return {name.partition(".")[0] for name in found}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_of_verls_imports_nothing_of_anytron(script):
    packages = imported(script.read_text(encoding="utf-8"))
    assert packages
    assert [name for name in packages if name.startswith("anytron")] == []
    # The task of the example, which Anytron's own examples have too: it is there to write a data set.
    assert "sort_digits" not in packages or script.name == "prepare.py"


def test_the_command_line_starts_verls_own_entry_point():
    script = (EXAMPLE / "train_on_cpu.sh").read_text(encoding="utf-8")
    commands = "\n".join(line for line in script.splitlines() if not line.startswith("#"))
    assert re.findall(r"python (?:-m )?(\S+)", commands) == [
        '"$here/prepare.py"', "verl.trainer.main_ppo", '"$here/last_reward.py"',
    ]  # fmt: skip
    assert "anytron" not in commands


def test_an_import_by_name_is_seen():
    assert "anytron" in imported("import importlib\nimportlib.import_module('anytron.device.stack')")
