"""A whole run with an agent of a published framework, through the command line: verifiers 0.4."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import yaml

from anytron_conformance.tiny_models import CONFIGS
from tests.agents.test_verifiers_agent import OPTIONS, TASKSETS
from tests.core.serving import toys
from tests.house import ROOT
from tests.needs_agents import NEEDS_AGENTS

pytestmark = NEEDS_AGENTS
TOKENS = {
    "vocab_size": 400, "bos_token_id": None, "eos_token_id": toys.END, "pad_token_id": 3,
    "max_position_embeddings": 2000,
}  # fmt: skip
REWARD = """
from tests.core.serving.toys import tokenizer


def template():
    return tokenizer("qwen")


def letters(samples):
    return [sum(one.isalpha() for one in sample.turns[0]) / max(1, len(sample.turns[0])) for sample in samples]
"""


def test_a_random_model_is_trained_in_episodes_of_verifiers(tmp_path):
    (tmp_path / "task.py").write_text(REWARD)
    config = {
        "model": {"config": CONFIGS["qwen3"] | TOKENS, "tokenizer": "task.py:template", "dtype": "float32"},
        "data": {"source": "anytron_verifiers:prompts", "options": OPTIONS, "prompts_per_step": 2},
        "environment": {
            "agent": "anytron_verifiers:solve", "options": OPTIONS, "max_turns": 2, "processes": 2, "timeout_s": 300,
        },
        "rewards": [{"function": "environment"}, {"function": "task.py:letters"}],
        "rollout": {"samples_per_prompt": 4, "max_new_tokens": 8},
        "optimizer": {"lr": 3e-3},
        "trainer": {"total_steps": 2, "log_samples": 16, "output_dir": str(tmp_path / "run")},
        "tracking": {"plot": False},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "anytron", "train", str(tmp_path / "run.yaml")]
    found_by_all = {**os.environ, "PYTHONPATH": f"{ROOT}:{TASKSETS}"}  # by agents and by their tool servers
    done = subprocess.run(command, env=found_by_all, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    steps, samples = (
        [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "samples.jsonl")
    )
    assert len(steps) == 2
    for metrics in steps:
        assert metrics["rollout/log_prob_abs_diff"] <= 1e-5
        assert metrics["environment/failed"] == metrics["endpoint/refused"] == 0
        assert metrics["environment/metrics/num_turns"] == metrics["environment/turns_mean"]
        assert metrics["grad_norm"] > 0
    assert len(samples) == 2 * 8
    for sample in samples:
        assert sample["prompt"].count("<|im_start|>") == 4  # tools, the system's message, the row's, the model's turn
        assert "times 12?" in sample["prompt"]
