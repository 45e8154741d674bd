"""Every fault of docs/upstream/verl.md that verl and its default bridge have is there."""

from __future__ import annotations

import pytest

from plugins.verl.tests.by_path import load

programs = load("docs", "reproductions.py")
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
