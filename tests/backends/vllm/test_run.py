"""Whole runs with vLLM, through the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from anytron_vllm.installation import find_installation
from anytron_vllm.release import flaw
from tests.house import ROOT
from tests.needs_vllm import NEEDS_TORCHVISION, NEEDS_VLLM, WITH_TORCHVISION

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSION = installed.version if (installed := find_installation()) else "0"
pytestmark = [*NEEDS_VLLM, pytest.mark.slow, pytest.mark.timeout(1800)]


EXPERTS = pytest.mark.skipif(
    bool(flaw(VERSION, "experts on a processor")), reason="this vLLM runs no model with experts on a processor"
)


def anytron(*arguments: object, environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "anytron", *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("example", "steps", "more"),
    [
        ("grpo_sort_vllm.yaml", 50, []),
        ("grpo_sort_vllm.yaml", 10, ["model.lora={rank: 4}"]),
        ("grpo_sort_vllm.yaml", 10, ["model.lora={rank: 4}", "rollout.lora=alone"]),
        pytest.param("grpo_moe.yaml", 50, ["rollout.engine=vllm", "model.config.head_dim=32"], marks=EXPERTS),
    ],
    ids=["dense", "lora", "lora-alone", "experts"],
)
def test_rollout_and_training_agree_at_every_step(example, steps, more, tmp_path):
    output = tmp_path / "run"
    settings = [f"trainer.total_steps={steps}", f"trainer.output_dir={output}", "trainer.save_hf=false"]
    anytron("train", f"examples/{example}", *settings, *more)
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == steps
    assert max(step["rollout/log_prob_abs_diff"] for step in metrics) < 1e-5
    alone = "rollout.lora=alone" in more
    (model,) = (output / "initial_model").glob("*.safetensors")
    (size,) = {step["throughput/weight_bytes"] / model.stat().st_size for step in metrics}
    assert 0.01 < size < 0.2 if alone else 0.9 < size < 1.0


@pytest.mark.skipif(bool(flaw(VERSION, "routing on a processor")), reason="this vLLM records no experts on a processor")
def test_training_replays_the_experts_that_vllm_chose(tmp_path):
    """In bfloat16, where the routers of the two engines do not always agree."""
    settings = ["rollout.engine=vllm", "model.config.head_dim=32", "model.dtype=bfloat16", "trainer.total_steps=10"]
    settings += ["algorithm.mini_batches=1", 'engine.options.router_replay="off"', "trainer.save_hf=false"]
    found = []
    for replay in ("true", "false"):
        output = tmp_path / replay
        where = f"trainer.output_dir={output}"
        anytron("train", "examples/grpo_moe.yaml", *settings, where, f"rollout.replay_routing={replay}")
        found.append([json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()])
    replayed, own = found
    assert all(step["moe/rerouted_fraction"] > 0.0 for step in replayed)
    assert not any("moe/rerouted_fraction" in step for step in own)
    differences = [sum(step["rollout/log_prob_abs_diff"] for step in steps) for steps in found]
    assert differences[0] < differences[1]


def test_verify_compares_vllm_s_log_softmax(tmp_path):
    anytron("verify", "examples/grpo_sort_vllm.yaml", f"trainer.output_dir={tmp_path / 'run'}")


@NEEDS_TORCHVISION
def test_pictures_are_the_same_to_rollout_and_training(tmp_path):
    output = tmp_path / "run"
    wider = {  # heads of 32: vLLM's attention on the processor has no kernel for those of 16
        "text_config.hidden_size": 128,
        "text_config.rope_parameters.mrope_section": [8, 4, 4],
        "vision_config.out_hidden_size": 128,
    }
    settings = [f"model.config.{key}={value}" for key, value in wider.items()]
    settings += ["rollout.engine=vllm", "trainer.total_steps=10", f"trainer.output_dir={output}"]
    anytron("train", "examples/grpo_count_shapes.yaml", *settings, environment=WITH_TORCHVISION)
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 10
    assert max(step["rollout/log_prob_abs_diff"] for step in metrics) < 1e-5
