"""verl's own vLLM rollout on a processor: it has all weights of an update, and Megatron's probabilities."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from plugins.verl.tests.example import FOLDER, steps_in, train

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
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]


def test_layers_whose_weights_come_in_several_buckets_have_them_all(tmp_path, ranks):
    found = ranks("updated.py", tmp_path)
    assert found["buckets"] > 2
    assert found["vllm"] == pytest.approx(found["transformers"], abs=1e-4)


@pytest.mark.slow
def test_vllm_has_megatrons_probabilities(tmp_path):
    named = tmp_path / "named" / "vllm-0.32.0+cpu.dist-info"  # verl asks for a distribution of this name
    named.mkdir(parents=True)
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    paths = os.pathsep.join([str(named.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run([sys.executable, FOLDER / "prepare.py", tmp_path / "wide", "2", "32"], check=True)

    _, log = train(
        tmp_path, f"actor_rollout_ref.model.path={tmp_path}/wide/model", *OVERRIDES, PYTHONPATH=paths,
        VLLM_NO_USAGE_STATS="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_CPU_KVCACHE_SPACE="1",
    )  # fmt: skip

    assert "steps of 2; {" in log, log[-5000:]
    steps = [step for step in steps_in(tmp_path) if "training/rollout_probs_diff_max" in step]
    assert len(steps) == 2
    assert max(step["training/rollout_probs_diff_max"] for step in steps) < 0.005
    assert min(step["training/rollout_actor_probs_pearson_corr"] for step in steps) > 0.99
