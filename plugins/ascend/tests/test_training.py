"""A sampled run of Megatron on two simulated NPUs: portable modules, torch_npu's kernels, HCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys


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
