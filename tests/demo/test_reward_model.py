"""GRPO from a reward model, run as a user runs it: processes of their own, and a layout that is not the policy's."""

import json

import pytest

from anytron.testing.training.sort_task import VOCABULARY
from tests.demo.test_grpo_sort import ROOT, anytron
from tests.reward_models import write_judge_of_last_tokens

EOS = VOCABULARY.index("<eos>")
WORTH = [digit / 9 for digit in range(10)] + [-1.0] * 6
"""Of the last token in front of the end: the policy is to end with a 9."""


def train(output, judge, *overrides):
    judged = {"path": str(judge), "max_tokens_per_micro_batch": 512, **overrides[0]}
    finished = anytron(
        "train",
        str(ROOT / "examples" / "grpo_sort.yaml"),
        f"trainer.output_dir={output}",
        f"reward_model={json.dumps(judged)}",
        "rewards=[{function: reward_model}]",
        "tracking.plot=false",
        *overrides[1:],
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("reward_model", "policy"),
    [({}, ()), ({"parallel": {"tensor_model_parallel_size": 2}, "offload": True}, ("parallel.data_parallel_size=2",))],
    ids=["one", "tp2-beside-dp2"],
)
def test_a_policy_learns_what_a_reward_model_likes(reward_model, policy, tmp_path):
    judge = write_judge_of_last_tokens(tmp_path / "judge", WORTH, padding=EOS)
    metrics = train(tmp_path / "run", judge, reward_model, "trainer.total_steps=60", *policy)
    means = [line["reward/mean"] for line in metrics]
    assert means[0] < 0.5
    assert sum(means[-5:]) / 5 > 0.9
    assert (tmp_path / "run" / "logs" / "reward_model-0.log").is_file()
    assert "reward_model" in json.loads((tmp_path / "run" / "patches.json").read_text())
