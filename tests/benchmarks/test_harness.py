"""What benchmarks print."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import weakref

import pytest
import torch

from anytron.device.runtime import MemoryStats
from anytron_cpu.runtime import CpuRuntime
from benchmarks import harness
from tests.house import ROOT

SMALL = {
    "confined_reading.py": ["--words", "100", "--prompts", "20", "--turns", "1"],
    "code_reward.py": ["--turns", "1", "--programs", "1"],
    "driver.py": ["--ranks", "2", "32", "--tokens", "0.01", "0.02"],
    "long_runs.py": ["--steps", "20", "--prompts", "20"],
    "planning.py": ["--counts", "4", "200", "--repeats", "1"],
    "prompts.py": ["--prompts", "20"],
    "sequences.py": ["--counts", "4", "8", "--repeats", "1"],
    "weight_sync.py": ["--layers", "1", "--hidden", "64", "--turns", "1"],
}
MINUTES = {
    "attention.py": ["--repeats", "1"],
    "checkpoint.py": ["--layers", "1", "--hidden", "64", "--saves", "1"],
    "grpo_step.py": ["--size", "toy", "--steps", "2", "--rounds", "1"],
    "hooks.py": ["--steps", "2"],
    "on_policy.py": ["--size", "toy", "--steps", "2", "--rounds", "1"],
    "start.py": ["--turns", "1"],
    "log_probs.py": ["--tokens", "32", "--vocabulary", "1500", "--hidden", "16", "--chunk", "8", "--turns", "1"],
    "train_step.py": ["--size", "tiny", "--tokens", "64", "128", "--turns", "1", "--plain"],
}


class Chip(CpuRuntime):
    device_type = "chip"

    def __init__(self):
        self.waits = []

    def synchronize(self):
        self.waits.append("wait")

    def device_name(self):
        return "Chip 1"

    def memory_stats(self):
        return MemoryStats(0, 0, 0, 8 * 10**9)


@pytest.mark.some(2)
@pytest.mark.parametrize("name", [*SMALL, *(pytest.param(name, marks=pytest.mark.slow) for name in MINUTES)])
def test_each_prints_one_object_or_tables(name):
    program = [sys.executable, str(ROOT / "benchmarks" / name), *(SMALL | MINUTES)[name]]
    done = subprocess.run([*program, "--json"], capture_output=True, text=True, check=True)
    made = json.loads(done.stdout)
    assert list(made) == ["device", "versions", "command", "figures"]
    assert made["command"].startswith(f"python benchmarks/{name} ")
    assert made["device"]["cores"] >= 1
    assert made["versions"]["torch"]
    assert made["figures"]
    assert done.stderr, "it says what it does"

    text = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    assert text.startswith(made["command"].removesuffix(" --json") + "\n")
    for figure in made["figures"]:
        assert f"\n{figure} " in text


def test_each_benchmark_is_tested():
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    elsewhere = "learning.py"  # needs a published model: test_learning.py
    assert scripts == {"harness.py", elsewhere, *SMALL, *MINUTES}, "a new one enters SMALL or MINUTES"


def test_the_ways_take_turns_and_the_first_turns_do_not_count():
    calls = []
    ways = {"a": lambda: calls.append("a") or len(calls), "b": lambda: calls.append("b") or len(calls)}
    assert harness.in_turn(ways, 2) == {"a": [3, 5], "b": [4, 6]}
    assert calls == ["a", "b"] * 3
    assert harness.in_turn({"a": lambda: 1}, 2, warm_up=0) == {"a": [1, 1]}


def test_a_measurement_waits_for_the_device_before_and_afterwards():
    chip = Chip()
    seconds, result = harness.timed(lambda: list(chip.waits), chip)
    assert result == ["wait"]
    assert chip.waits == ["wait", "wait"]
    assert seconds > 0


def test_memory_is_of_a_command_and_its_descendants(started_cold):
    inner = "import time; held = b'1' * 60_000_000; time.sleep(1.0)"
    outer = f"import subprocess, sys; held = b'1' * 40_000_000; subprocess.run([sys.executable, '-c', {inner!r}])"
    peak = harness.run_measured([sys.executable, "-c", outer], memory=True)
    assert 100_000_000 < peak < 140_000_000, "with two interpreters"
    assert harness.run_measured([sys.executable, "-c", ""], memory=False) is None
    with pytest.raises(subprocess.CalledProcessError):
        harness.run_measured([sys.executable, "-c", "raise SystemExit(3)"], memory=True)


@pytest.mark.slow
def test_memory_does_not_depend_on_who_else_has_the_same_libraries(tmp_path, started_cold):
    """This process has torch, too."""
    said = tmp_path / "status"
    program = f"import pathlib, time, torch; text = pathlib.Path('/proc/self/status').read_text(); time.sleep(1.0); \
pathlib.Path({str(said)!r}).write_text(text)"
    peak = harness.run_measured([sys.executable, "-c", program], memory=True)
    assert peak == pytest.approx(1024 * int(re.search(r"VmRSS:\s+(\d+) kB", said.read_text())[1]), rel=0.05)


def test_what_does_not_fit_leaves_nothing_behind(capsys):
    held = []

    class Full(Chip):
        emptied = 0

        def is_out_of_memory(self, error):
            return "out of memory" in str(error)

        def empty_cache(self):
            self.emptied += held[-1]() is None

    def fail(message):
        tensor = torch.zeros(3)
        held.append(weakref.ref(tensor))
        refers_to_its_frame = RuntimeError(message)
        raise refers_to_its_frame

    chip = Full()
    assert harness.unless_out_of_memory(lambda: 7, chip) == 7
    assert harness.unless_out_of_memory(lambda: fail("CUDA out of memory: 2 GiB"), chip) is None
    assert chip.emptied == 1, "the tensor is gone before the cache is emptied"
    assert "2 GiB" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="illegal"):
        harness.unless_out_of_memory(lambda: fail("an illegal memory access"), chip)


def test_memory_that_may_not_be_read_is_not_counted_as_none(monkeypatch, started_cold):
    def refuse(pid):
        raise PermissionError(pid)

    monkeypatch.setattr(harness, "_fields", refuse)
    assert harness.run_measured([sys.executable, "-c", ""], memory=True) is None


def test_an_accelerator_is_named():
    assert harness.device(Chip()) == {**harness.device(), "accelerator": "Chip 1", "accelerator_bytes": 8 * 10**9}


def test_a_report_for_people():
    made = {
        "device": {"processor": "P", "cores": 2, "memory_bytes": 16 * 10**9},
        "versions": {"python": "3", "torch": "2"},
        "command": "python benchmarks/x.py",
        "figures": {
            "ways": {"ours": {"step_s": 0.123456, "peak_bytes": 2_500_000}, "theirs": {"step_s": 12, "ratio": None}},
            "tokens": 65536,
            "ratio": 1.23456,
        },
    }
    assert harness.as_text(made).splitlines() == [
        "python benchmarks/x.py",
        "processor P, cores 2, memory 16 GB",
        "python 3, torch 2",
        "",
        "tokens  65,536",
        "ratio   1.235",
        "",
        "ways    step_s  peak_bytes  ratio",
        "ours    0.1235      2.5 MB      -",
        "theirs      12           -      -",
    ]
