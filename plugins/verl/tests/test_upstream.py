"""Every fault of docs/upstream/verl.md that verl and its default bridge have is there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


def _loaded(path):
    """Load a file of our tests by its path: verl's wheel has a package ``tests``, which hides ours."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


programs = _loaded(Path(__file__).parents[3] / "tests" / "docs" / "reproductions.py")
HERE = ("verl", "megatron-bridge")
FAULTS = programs.reproductions(*HERE)


@pytest.fixture(scope="module")
def found():
    ran = {}

    def outcome(one):
        if one.setting not in ran:
            ran[one.setting] = programs.outcomes(one.setting, *HERE)
        return ran[one.setting]

    return outcome


@pytest.mark.parametrize("one", FAULTS, ids=lambda one: one.title)
def test_the_fault_is_there(one, found):
    assert one.is_installed, one.requirements
    status, said = found(one)[one.title]
    assert status == 0, said
    assert said.strip()
