"""Megatron on two simulated NPUs against Megatron on the processor: recorded trajectories, then a sampled run.

Adaptor ``none``: portable modules, torch_npu's kernels, HCCL.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.backends.megatron.conftest import follow, policy_loss, recorded, start_engine, tiny_family, tiny_model

__all__ = ["follow", "policy_loss", "recorded", "start_engine", "tiny_family", "tiny_model"]  # fixtures

ASCEND = {"platform": {"name": "ascend"}}
LAYOUTS = {
    "tp2-sp": {"parallel": {"tensor_model_parallel_size": 2}},
    "tp2-sp-bshd": {"parallel": {"tensor_model_parallel_size": 2}, "engine": {"sequence_format": "bshd"}},
    "cp2": {"parallel": {"context_parallel_size": 2}},
}


@pytest.fixture(scope="module")
def on_the_processor(follow):
    return follow()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_npus_agree_with_the_processor(layout, on_the_processor, follow):
    found = follow(**ASCEND, **LAYOUTS[layout])
    relative = (found.log_probs - on_the_processor.log_probs).abs() / on_the_processor.log_probs.abs().clamp(min=1.0)
    assert relative.max().item() <= 1e-4
    for norm, expected in zip(found.grad_norms, on_the_processor.grad_norms, strict=True):
        assert norm == pytest.approx(expected, rel=1e-4)
    for name, weight in on_the_processor.weights.items():
        assert (found.weights[name] - weight).abs().max().item() <= 1e-4, name


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
