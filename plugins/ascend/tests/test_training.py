"""Megatron on two simulated NPUs against Megatron on the processor: recorded trajectories, then a sampled run.

Adaptor ``none``: portable modules, torch_npu's kernels, HCCL.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.backends.megatron.conftest import (
    follow,
    install_plugin,
    policy_loss,
    ranks,
    recorded,
    tiny_model,
    write_extension,
)
from tests.backends.megatron.engine.test_agreement import differences

__all__ = ["follow", "install_plugin", "policy_loss", "ranks", "recorded", "tiny_model", "write_extension"]  # fixtures

LAYOUTS = {
    "tp2-sp": {"parallel": {"tensor_model_parallel_size": 2}},
    "tp2-sp-bshd": {"parallel": {"tensor_model_parallel_size": 2}, "engine": {"sequence_format": "bshd"}},
    "cp2": {"parallel": {"context_parallel_size": 2}},
}


@pytest.fixture(scope="module")
def on_the_processor(follow):
    return follow(platform={"name": "cpu"})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_npus_agree_with_the_processor(layout, on_the_processor, follow):
    found = differences(on_the_processor, follow(platform={"name": "ascend"}, **LAYOUTS[layout]))
    assert max(found.values()) <= 1e-4, found


@pytest.mark.slow
def test_a_broken_all_reduce_is_noticed(on_the_processor, follow, write_extension):
    """A tensor-parallel sum that forgets the other NPU."""
    write_extension("megatron.core.tensor_parallel.mappings:_reduce", "lambda original: lambda x, group=None: x")
    without_sp = {"tensor_model_parallel_size": 2, "sequence_parallel": False}
    found = differences(on_the_processor, follow(platform={"name": "ascend"}, parallel=without_sp))
    assert min(found.values()) > 1e-4, found
    assert found["log_probs"] > 1e-3, found


def test_ten_sampled_steps(tmp_path):
    command = [
        sys.executable, "-m", "anytron", "train", "examples/grpo_sort.yaml",
        "trainer.total_steps=10", "parallel.tensor_model_parallel_size=2", "data.prompts_per_step=4",
        "trainer.rollout_log_prob_tolerance=0.01", f"trainer.output_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    done = subprocess.run(
        command,
        env={**os.environ, "ANYTRON_PLATFORM": "ascend"},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert "platform: ascend (asked for by ANYTRON_PLATFORM; 8 NPU(s), torch_npu" in done.stdout
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 10
    patches = json.loads((tmp_path / "run" / "patches.json").read_text())
    assert [rank["device"] for rank in patches["trainer"]] == ["Ascend910B2", "Ascend910B2"]
    (modules,) = patches["trainer"][1]["decisions"]
    assert (modules["name"], modules["value"]) == ("modules", "portable")
    assert "modules: portable (platform.options.adaptor=none is the default)" in done.stdout
