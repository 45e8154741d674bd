"""Metrics that real engines add are in the tables; tests/core/run/trainer/test_metric_table.py has the others."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from anytron.record.tracking.metric_table import METRICS
from anytron_megatron.options import METRICS as OF_MEGATRON
from tests.demo.test_grpo_sort import users_environment

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_moe.yaml"
OVERRIDES = (
    "trainer.total_steps=1",
    "data.prompts_per_step=4",
    "engine.offload=[optimizer, gradients]",
    "rollout.sleep=true",
    "engine.options.transformer.moe_router_load_balancing_type=aux_loss",
    "engine.options.transformer.moe_aux_loss_coeff=0.001",
    "engine.options.transformer.moe_z_loss_coeff=0.0001",
)
EXPECTED = {"moe/load_balancing_loss", "moe/z_loss", "moe/rerouted_fraction"}


@pytest.mark.slow
def test_experts_and_memory_are_measured(tmp_path):
    command = [sys.executable, "-m", "anytron", "train", str(EXAMPLE), f"trainer.output_dir={tmp_path / 'run'}"]
    done = subprocess.run([*command, *OVERRIDES], env=users_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    keys = json.loads((tmp_path / "run" / "metrics.jsonl").read_text()).keys()

    table = [*METRICS, *OF_MEGATRON]
    assert [key for key in keys if sum(metric.matches(key) for metric in table) != 1] == []
    assert keys >= EXPECTED | {metric.name for metric in METRICS if metric.name.startswith("memory/")}
