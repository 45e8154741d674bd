"""The example with a task of reasoning-gym, run as a user runs it: it imitates answers, then the verifier rewards."""

import json

import pytest

from tests.demo.expected import assert_rewarded
from tests.demo.test_grpo_sort import ROOT, anytron


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_learns_to_spell_backward(tmp_path):
    finished = anytron("train", str(ROOT / "examples" / "reasoning_gym.yaml"), f"trainer.output_dir={tmp_path / 'run'}")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    metrics = [json.loads(line) for line in (tmp_path / "run" / "2-grpo" / "metrics.jsonl").read_text().splitlines()]
    assert max(line["rollout/log_prob_abs_diff"] for line in metrics) < 1e-5
    assert sum(line["reward/mean"] for line in metrics[:10]) / 10 < 0.7
    assert_rewarded("reasoning_gym", metrics)
