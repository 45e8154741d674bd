"""What a worker observes of its rank."""

from __future__ import annotations

import contextlib
import gzip
import json

import pytest
import torch

from anytron.base.metric import largest
from anytron.device.runtime import MemoryStats
from anytron.workers.executor.observer import OBSERVED, RankObserver, _sizes
from anytron_cpu.runtime import CpuRuntime


class Chip(CpuRuntime):
    """A device that remembers its ranges, and whose peak begins anew."""

    def __init__(self):
        self.ranges, self.peak = [], 7

    @contextlib.contextmanager
    def profiler_range(self, name):
        self.ranges.append(f"begin {name}")
        yield
        self.ranges.append(f"end {name}")

    def memory_stats(self):
        return MemoryStats(0, self.peak, 0, 100)

    def reset_peak_memory_stats(self):
        self.peak = 0


def recorded(observer, path, largest=10**9):
    observer.begin_trace(True, stacks=False, memory=False)
    with observer.marked("update"):
        torch.ones(4, 4) @ torch.ones(4, 4)
    return observer.end_trace(str(path), largest)


def test_calls_are_ranges_in_the_devices_profiler_and_in_a_trace(tmp_path):
    chip = Chip()
    assert recorded(RankObserver(chip), tmp_path / "deep" / "trace.json.gz") is None
    events = json.loads(gzip.decompress((tmp_path / "deep" / "trace.json.gz").read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"update", "aten::mm"} <= names
    assert chip.ranges == ["begin update", "end update"]


def test_nothing_is_recorded_unasked(tmp_path):
    observer = RankObserver(Chip())
    observer.begin_trace(False, stacks=False, memory=False)
    with observer.marked("update"):
        pass
    assert observer.end_trace(str(tmp_path / "trace.json.gz"), 1) is None
    assert list(tmp_path.iterdir()) == []


def test_what_is_too_large_or_cannot_be_written_is_said(tmp_path):
    observer = RankObserver(Chip())
    assert "trainer.profile.max_mib allows 10" in recorded(observer, tmp_path / "trace.json.gz", 10)
    (tmp_path / "file").touch()
    assert "Error" in recorded(observer, tmp_path / "file" / "trace.json.gz")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_peak_of_memory_begins_anew():
    observer = RankObserver(Chip())
    assert [observer.peak_memory(), observer.peak_memory()] == [7, 0]


def test_an_engine_that_leaves_the_device_alone_is_left_alone():
    with RankObserver(None).marked("generate"):
        pass


@pytest.mark.parametrize("name", OBSERVED)
def test_what_a_worker_answers_itself_exists_and_no_engine_has_it(name):
    from anytron.workers.engines import training_engine

    assert callable(getattr(RankObserver, name))
    protocols = [value for value in vars(training_engine).values() if isinstance(value, type)]
    assert not any(hasattr(protocol, name) for protocol in protocols)


def test_figures_of_memory_that_torch_cannot_tell_are_left_out():
    assert largest("memory/peak", [3, 5]) == {"memory/peak": 5}
    assert largest("memory/peak", [3, None]) == {}
    assert _sizes(MemoryStats(None, None, None, 2 << 30)) == "2.00 GiB in all"
    assert _sizes(MemoryStats(None, None, None, None)) == "memory is not known"
