"""Whole runs with a reward model whose scores follow from what was written, and a policy that learns from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from anytron.base.errors import ConfigError, DataError
from anytron_conformance.training.sort_task import VOCABULARY, tokenizer
from tests.core.run.trainer.disturbed_runs import lines
from tests.reward_models import write_judge_of_last_tokens

EOS = VOCABULARY.index("<eos>")
WORTH = [digit / 10 for digit in range(10)] + [-1.0, 5.0] + [-2.0] * 4
"""Of each token; that of the end token would be seen if it were read."""
ASKED = {"function": "reward_model", "weight": 2.0}
NAN = """
def other_tokenizer():
    made = tokenizer()
    made.add_tokens(["<think>"])
    return made
"""


@pytest.fixture
def judge(tmp_path):
    return str(write_judge_of_last_tokens(tmp_path / "judge", WORTH, padding=EOS))


def worth(sample):
    """Of the last token that does not end the sequence; the prompt ends with the separator."""
    kept = [token for token in sample["response_tokens"] if token != EOS]
    return WORTH[kept[-1]] if kept else WORTH[VOCABULARY.index(">")]


def test_scores_are_a_reward_with_its_weight_beside_functions_and_in_validation(new_run, judge):
    data = {"source": "task.py:prompts", "options": {"count": 6, "digits": 3}}
    examined = {"name": "held_out", "data": data, "samples_per_prompt": 2}
    run = new_run(
        reward_model={"path": judge},
        rewards=[{"function": "task.py:reward"}, ASKED],
        validation={"sets": [examined]},
        trainer={"total_steps": 2, "log_samples": 64},
    )
    run.train()
    output = Path(run.config.trainer.output_dir)
    metrics, samples = lines(output / "metrics.jsonl"), lines(output / "samples.jsonl")
    trained = [one for one in samples if "validation" not in one]
    assert len(trained) == 2 * 64
    for one in samples:
        answer = sorted(one["prompt"].removesuffix(">"))
        right = sum(given == wanted for given, wanted in zip(one["response"], answer, strict=False)) / len(answer)
        assert one["reward"] == pytest.approx(right + 2.0 * worth(one), abs=1e-5)
    first = [worth(one) for one in trained if one["step"] == 1]
    assert metrics[0]["reward/reward_model/mean"] == pytest.approx(sum(first) / len(first), abs=1e-5)
    assert {one["response_tokens"][-1] == EOS for one in trained} == {True, False}, "both kinds of end"
    (held_out,) = lines(output / "validation.jsonl")
    examined = [worth(one) for one in samples if "validation" in one]
    found = held_out["validation/held_out/reward/reward_model/mean"]
    assert len(examined) == 12
    assert found == pytest.approx(sum(examined) / 12, abs=1e-5)


@pytest.mark.slow
def test_the_policy_learns_what_the_model_likes(new_run, judge):
    run = new_run(reward_model={"path": judge}, rewards=[ASKED], trainer={"total_steps": 25})
    run.train()
    means = [line["reward/mean"] for line in lines(Path(run.config.trainer.output_dir) / "metrics.jsonl")]
    assert sum(means[-5:]) / 5 > means[0] + 0.6


def test_a_model_of_another_vocabulary_is_refused_before_anything_starts(new_run, judge):
    run = new_run(NAN, reward_model={"path": judge}, rewards=[ASKED], model={"tokenizer": "task.py:other_tokenizer"})
    with pytest.raises(ConfigError, match=r"(?s)reward model's vocabulary differs.*reward_model\.path.*<think>"):
        run.train()
    assert run.executor.started == []


def test_its_context_leaves_out_prompts_that_leave_no_room(new_run, tmp_path):
    judge = write_judge_of_last_tokens(tmp_path / "judge", WORTH, padding=EOS)
    text = (judge / "config.json").read_text().replace('"max_position_embeddings": 64', '"max_position_embeddings": 5')
    (judge / "config.json").write_text(text)
    with pytest.raises(DataError, match="of its 64 prompts, 64 have more than 2 tokens"):
        new_run(reward_model={"path": str(judge)}, rewards=[ASKED]).train()


def test_scores_that_are_not_finite_end_a_run_that_has_no_others(new_run, tmp_path):
    broken = write_judge_of_last_tokens(tmp_path / "judge", [torch.inf] * 16, padding=None)
    with pytest.raises(DataError, match=r"(?s)The reward model returned the score (nan|inf).*every sample of the step"):
        new_run(reward_model={"path": str(broken)}, rewards=[ASKED]).train()


def test_the_tokenizer_of_the_judge_is_that_of_the_task(judge):
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(judge).get_vocab() == tokenizer().get_vocab()
