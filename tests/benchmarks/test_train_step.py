"""Updates that are measured side by side."""

from __future__ import annotations

import importlib

import pytest
import torch

from anytron.device.runtime import MemoryStats
from anytron_cpu.runtime import CpuRuntime
from tests.house import ROOT


class Full(CpuRuntime):
    """A device that counts its updates, the bytes of each ten times its number."""

    def __init__(self):
        self.number = 0

    def is_out_of_memory(self, error):
        return isinstance(error, torch.OutOfMemoryError)

    def memory_stats(self):
        return MemoryStats(0, 10 * self.number, 0, 1000)


@pytest.fixture
def train_step(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("train_step")


def test_what_does_not_fit_is_tried_once_and_has_no_figures(train_step, capsys):
    device, tries = Full(), []

    def ours():
        device.number += 1
        return 1.0

    def bare():
        tries.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    found = train_step.measure({"ours": ours, "bare": bare}, device, 3)
    assert found["bare"] is None
    assert len(tries) == 1
    assert "20 GiB" in capsys.readouterr().err
    columns = train_step.row(found, 128, 1e9, 1e12, has_peak_bytes=True)
    assert set(columns) == {"ours_tokens_per_s", "ours_mfu", "ours_peak_bytes"}
    assert columns["ours_peak_bytes"] == 40  # the turn before those that count has the first ten


def test_ratios_are_ours_by_theirs_in_speed_and_theirs_by_ours_in_memory(train_step):
    found = {"ours": [(1.0, 1.0), (10, 10)], "bare": [(2.0, 2.0), (30, 40)], "plain": None}
    columns = train_step.row(found, 128, 1e9, 1e12, has_peak_bytes=True)
    assert (columns["ours_by_bare"], columns["bare_peak_by_ours"]) == (2.0, 4.0)
    assert not any("plain" in name for name in columns)
