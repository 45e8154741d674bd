"""Streams that are queues: a missing wait reads the old bytes, each time; a run that waits changes no bit."""

import json
import os
import subprocess
import sys

import pytest
from anytron_ascend_simulator import activation
from safetensors.torch import load_file

ASYNCHRONOUS = {activation.ASYNCHRONOUS: "1"}
TIMES = ("time/", "throughput/")


def printed(output):
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def cases(output):
    return {one.pop("case"): one for one in printed(output) if "case" in one}


@pytest.fixture(scope="module")
def on_one_device(run_program, tmp_path_factory):
    return run_program("waits.py", str(tmp_path_factory.mktemp("scratch")), environment=ASYNCHRONOUS)[0]


def test_a_missing_wait_reads_the_old_bytes(on_one_device):
    old, new, overwritten = [0.0] * 3, [1.0] * 3, [7.0] * 3
    found = cases(on_one_device)
    assert "index 5 is out of bounds" in found.pop("an index that does not exist")["says"]
    assert found == {
        "a_side_stream_reads": {"without": old, "with": new},
        "the_current_stream_reads": {"without": old, "with": new},
        "an_event_is_recorded_too_early": {"without": old, "with": new},
        "a_kernel_of_cann": {"without": old, "with": new},
        "the_host_reads_a_copy": {"without": old, "with": new},
        "the_host_overwrites_what_is_copied": {"without": overwritten, "with": new},
        "freed_memory_is_used_again": {"without": overwritten, "with": new},
    }


def test_the_kit_finds_streams_that_do_not_wait(on_one_device):
    found = [one for one in printed(on_one_device) if "rule" in one]
    assert [one["status"] for one in found] == ["failed", "failed", "failed", "passed", "passed"]
    waits, memory, synchronize, *_ = (one["says"] for one in found)
    assert "A stream did not wait for the other stream" in waits
    assert "Memory was used again while another stream still read it" in memory
    assert "A copy to the host is incomplete after synchronize" in synchronize


def test_a_collective_that_nothing_waits_for_has_no_result(run_program):
    first, second = map(cases, run_program("async_collectives.py", ranks=2, environment=ASYNCHRONOUS))
    assert first.pop("the_sum_is_read") == {"without": [1.0] * 3, "with": [3.0] * 3}
    assert second.pop("the_sum_is_read") == {"without": [2.0] * 3, "with": [3.0] * 3}
    assert first.pop("a_message_is_read") == {"without": [1.0] * 3, "with": [1.0] * 3}  # the sender's own
    assert second.pop("a_message_is_read") == {"without": [2.0] * 3, "with": [1.0] * 3}
    assert first == second
    assert first == {
        "gathered_parts_are_read": {"without": [0.0, 0.0], "with": [1.0, 2.0]},
        "exchanged_parts_are_read": {"without": [0.0, 0.0], "with": [1.0, 2.0]},
        "the_input_is_written_by_another_stream": {"without": [3.0] * 3, "with": [30.0] * 3},
        "the_input_is_overwritten": {"without": [-1.0, -1.0], "with": [1.0, 2.0]},
    }


def test_a_setting_that_is_neither_on_nor_off_is_refused(run_program):
    program = "from anytron_ascend_simulator import preload\npreload()\n"
    output = run_program(program, environment={activation.ASYNCHRONOUS: "yes"}, fails=True)[0]
    assert "ANYTRON_ASCEND_SIMULATOR_ASYNCHRONOUS is 'yes': set it to 1 or 0." in output


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_is_the_same_to_the_bit(ranks, tmp_path):
    steps = []
    for mode in ("0", "1"):
        command = [
            sys.executable, "-m", "anytron", "train", "examples/grpo_sort.yaml", "trainer.total_steps=3",
            "data.prompts_per_step=4", f"parallel.tensor_model_parallel_size={ranks}",
            f"trainer.output_dir={tmp_path / mode}",
        ]  # fmt: skip
        environment = {**os.environ, "ANYTRON_PLATFORM": "ascend", activation.ASYNCHRONOUS: mode}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / mode / "metrics.jsonl").read_text().splitlines()
        steps.append([{k: v for k, v in json.loads(line).items() if not k.startswith(TIMES)} for line in lines])
    assert steps[0] == steps[1]
    assert len(steps[0]) == 3
    weights = sorted((tmp_path / "0").rglob("*.safetensors"))
    assert weights
    for path in weights:
        now, queued = load_file(path), load_file(tmp_path / "1" / path.relative_to(tmp_path / "0"))
        assert now.keys() == queued.keys()
        assert all(now[name].equal(queued[name]) for name in now), path


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("level", ["device", "sequences", "kernels", "model", "training"])
def test_the_kit_finds_no_missing_wait(level):
    """The models of every family, and their training on several ranks."""
    done = subprocess.run(
        [sys.executable, "-m", "anytron", "conformance", "ascend", "--level", level, "--json"],
        env={**os.environ, **ASYNCHRONOUS}, capture_output=True, text=True, check=False, timeout=1800,
    )  # fmt: skip
    assert {one["status"] for one in json.loads(done.stdout)["results"]} == {"passed"}, done.stdout
