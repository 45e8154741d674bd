"""verl's own vLLM rollout on a processor: it has Megatron's probabilities, after an update too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "verl"
ROLLOUT = "actor_rollout_ref.rollout"
OVERRIDES = [
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.enforce_eager=True",
    f"{ROLLOUT}.free_cache_engine=False",
    f"+{ROLLOUT}.enable_sleep_mode=False",
    f"+{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls=anytron_verl.rollout.vllm_worker.WorkerExtension",
    f"+{ROLLOUT}.engine_kwargs.vllm.weight_transfer_config.backend=anytron",
    "trainer.total_training_steps=2",
    "trainer.test_freq=10",
]
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_vllm_has_megatrons_probabilities(tmp_path):
    named = tmp_path / "named" / "vllm-0.32.0+cpu.dist-info"  # verl asks for a distribution of this name
    named.mkdir(parents=True)
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    paths = os.pathsep.join([str(named.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **os.environ, "PYTHONPATH": paths, "DIRECTORY": str(tmp_path), "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }  # fmt: skip
    prepare = [sys.executable, EXAMPLE / "prepare.py", tmp_path / "wide", "2", "32"]
    subprocess.run(prepare, env=environment, check=True)
    model = f"actor_rollout_ref.model.path={tmp_path}/wide/model"
    with (tmp_path / "log").open("wb") as log:
        subprocess.run(  # its last word is an error: in two steps nobody learns to sort
            ["bash", EXAMPLE / "train_on_cpu.sh", model, *OVERRIDES], env=environment, cwd=tmp_path,
            stdout=log, stderr=log, timeout=1700, check=False,
        )  # fmt: skip
    metrics = tmp_path / "metrics.jsonl"
    assert metrics.exists(), (tmp_path / "log").read_text(errors="replace")[-5000:]
    steps = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    assert len([step for step in steps if "training/rollout_probs_diff_max" in step]) == 2
    assert max(step["training/rollout_probs_diff_max"] for step in steps) < 0.005
    assert min(step["training/rollout_actor_probs_pearson_corr"] for step in steps) > 0.99
