"""The fault of docs/upstream/mindspeed.md that MindSpeed-LLM has is there; with the real one, on simulated NPUs."""

from __future__ import annotations

import pytest

from tests.docs.reproductions import outcomes, reproductions

pytestmark = pytest.mark.mindspeed_llm


def test_the_fault_is_there(monkeypatch, with_mindspeed_llm):
    monkeypatch.setenv("PYTHONPATH", with_mindspeed_llm["PYTHONPATH"])
    (fault,) = reproductions("mindspeed-llm")
    found = outcomes(fault.setting, "mindspeed-llm")
    assert found.pop("no fault")[0] == 1
    ((status, said),) = found.values()
    assert status == 0, said
    assert said.strip()
