"""Programs in texts of tests that CI does not run are checked for names: ruff looks only at the tests themselves."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from tests.house import ROOT

UNRUN = re.compile(r"\bmark\.(gpu|npu|mindspeed|mindspeed_llm)\b")
"""Marks of tests that need what CI lacks."""


def programs(text):
    """By their names, the texts of a module that are Python and import something."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            try:
                program = ast.parse(node.value.value)
            except SyntaxError:
                continue
            if any(isinstance(each, (ast.Import, ast.ImportFrom)) for each in ast.walk(program)):
                yield ast.unparse(node.targets[0]), node.value.value


def wrong_names(program):
    """What ruff says of names that a program does not define, or imports without need."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F", "--output-format=concise", "-"]
    done = subprocess.run(command, input=program, capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if re.match(r"-:\d+", line)]


def unrun():
    for folder in ("tests", "plugins"):
        for path in sorted((ROOT / folder).rglob("test_*.py")):
            if UNRUN.search(text := path.read_text(encoding="utf-8")) and path.name != "test_unrun_code.py":
                for name, program in programs(text):
                    yield pytest.param(program, id=f"{path.relative_to(ROOT)}:{name}")


@pytest.mark.parametrize("program", list(unrun()))
def test_a_program_that_ci_does_not_run_knows_its_names(program):
    assert wrong_names(program) == []


def test_a_name_that_moved_would_be_found():
    moved = "from anytron.config.schema import default_run\n\nprint(RunConfig)\n"
    ((_, program),) = programs(f"CODE = {moved!r}")
    unused, undefined = wrong_names(program)
    assert "F401" in unused
    assert "RunConfig" in undefined
