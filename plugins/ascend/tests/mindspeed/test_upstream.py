"""Every fault of docs/upstream/mindspeed.md that MindSpeed has is there; with the real one, on simulated NPUs."""

from __future__ import annotations

import os

import pytest

from tests.docs.reproductions import outcomes, reproductions

pytestmark = pytest.mark.mindspeed


def test_the_faults_are_there(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.environ["ANYTRON_MINDSPEED"])
    (setting,) = {one.setting for one in reproductions("mindspeed")}
    found = outcomes(setting, "mindspeed")
    assert found.pop("no fault")[0] == 1
    assert found.keys() == {one.title for one in reproductions("mindspeed")}
    assert all(status == 0 and said.strip() for status, said in found.values()), found
