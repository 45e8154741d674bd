"""A whole run with an environment of the real verifiers, through the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import yaml

from anytron_conformance.tiny_models import CONFIGS
from tests.backends.verifiers import characters
from tests.house import ROOT
from tests.needs_verifiers import NEEDS_VERIFIERS

pytestmark = NEEDS_VERIFIERS
OPTIONS = {"name": "tests.backends.verifiers.toys", "args": {"kind": "guess", "max_turns": 3}}
END = len(characters.SIGNS)
TOKENS = {
    "vocab_size": characters.VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": END + 1,
}


def test_three_steps_of_a_random_model(tmp_path):
    config = {
        "model": {
            "config": CONFIGS["qwen3"] | TOKENS,
            "tokenizer": f"{characters.__file__}:tokenizer",
            "dtype": "float32",
        },
        "data": {"source": "anytron_verifiers:prompts", "options": OPTIONS, "prompts_per_step": 4},
        "environment": {
            "path": "anytron_verifiers:VerifiersEnvironment",
            "options": OPTIONS,
            "max_turns": 3,
            "max_observation_tokens": 16,
        },
        "rewards": [{"function": "environment"}],
        "rollout": {"samples_per_prompt": 4, "max_new_tokens": 4},
        "optimizer": {"lr": 1e-3},
        "trainer": {"total_steps": 3, "log_samples": 16, "output_dir": str(tmp_path / "run")},
        "tracking": {"plot": False},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "anytron", "train", str(tmp_path / "run.yaml")]
    found_by_all = {**os.environ, "PYTHONPATH": str(ROOT)}  # the environment's process has another directory
    done = subprocess.run(command, env=found_by_all, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    steps, samples = (
        [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "samples.jsonl")
    )
    assert len(steps) == 3
    for metrics in steps:
        assert metrics["rollout/log_prob_abs_diff"] <= 1e-5
        assert metrics["environment/failed"] == 0
        assert metrics["environment/turns_max"] == 3
        assert metrics["environment/metrics/num_turns"] == pytest.approx(metrics["environment/turns_mean"])
        assert metrics["grad_norm"] > 0
    assert len(samples) == 3 * 16
    for sample in samples:
        digit, turns = sample["prompt"].removeprefix("u:digit ").removesuffix("?;>"), sample["turns"]
        found = 1 / len(turns) if turns[-1] == digit else 0
        said = "".join(turns)
        digits = sum(one.isdigit() for one in said) / max(len(said), 1)
        assert sample["environment_reward"] == pytest.approx(found + digits / 2)
        assert observations(sample) == ["u:up;>" if one < digit else "u:down;>" for one in turns[: len(turns) - 1]]


def observations(sample) -> list[str]:
    """What the model was given to read in between; the template's end of a turn counts as the model's own."""
    signs = [*characters.SIGNS, *characters.SPECIAL]
    marked = [
        "|" if own else signs[token]
        for token, own in zip(sample["response_tokens"], sample["response_mask"], strict=True)
    ]
    holes = "".join(marked).replace("<eos>", "").split("|")
    return [hole for hole in holes if hole]
