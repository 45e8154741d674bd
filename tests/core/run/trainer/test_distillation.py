"""Whole runs in which a policy learns from a teacher, on its own responses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from anytron.base.errors import ConfigError, DataError
from anytron_conformance.training.sort_task import tokenizer
from tests.core.run.trainer.disturbed_runs import lines

PURE = {"advantage": "none", "distillation_coefficient": 1.0}
REWARDS = """
def fewer_sevens(samples):
    return [-sample.response_text.count("7") for sample in samples]


def other_tokenizer():
    made = tokenizer()
    made.add_tokens(["<think>"])
    return made
"""


@pytest.fixture
def teacher(tmp_path):
    """A model of another shape that knows what it wants, with the task's tokenizer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    directory = tmp_path / "teacher"
    torch.manual_seed(5)
    config = Qwen2Config(
        vocab_size=18,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(10.0)
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return str(directory)


def trained(run):
    run.train()
    return lines(Path(run.config.trainer.output_dir) / "metrics.jsonl")


def test_the_policy_comes_near_its_teacher(new_run, teacher):
    run = new_run(algorithm=PURE, teacher={"path": teacher}, trainer={"total_steps": 40})
    metrics = trained(run)
    divergence = [line["policy/teacher_kl"] for line in metrics]
    assert divergence[0] > 0.5
    assert sum(divergence[-5:]) / 5 < 0.5 * divergence[0]
    assert all(line["policy/ratio_mean"] == pytest.approx(1.0) for line in metrics), "one update on each batch"


def test_rewards_are_measured_and_teach_nothing(new_run, teacher, tmp_path):
    found = []
    for function in ("task.py:reward", "task.py:fewer_sevens"):
        trainer = {"total_steps": 3, "output_dir": str(tmp_path / str(len(found)))}
        rewards = [{"function": function}]
        found.append(
            trained(new_run(REWARDS, algorithm=PURE, teacher={"path": teacher}, rewards=rewards, trainer=trainer))
        )
    for one, other in zip(*found, strict=True):
        assert one["reward/mean"] != other["reward/mean"]
        assert [one[name] for name in ("loss/policy", "grad_norm", "policy/teacher_kl")] == [
            other[name] for name in ("loss/policy", "grad_norm", "policy/teacher_kl")
        ]


def test_a_teacher_is_enough(new_run, teacher):
    (line,) = trained(new_run(algorithm=PURE, teacher={"path": teacher}, rewards=[], trainer={"total_steps": 1}))
    assert line["reward/mean"] == line["reward/std"] == 0.0
    assert line["grad_norm"] > 0


def test_a_teacher_beside_rewards(new_run, teacher):
    algorithm = {"distillation_coefficient": 0.1, "mini_batches": 2}
    metrics = trained(new_run(algorithm=algorithm, teacher={"path": teacher}, trainer={"total_steps": 2}))
    assert all(line["policy/teacher_kl"] > 0 and line["grad_norm"] > 0 for line in metrics)


def test_another_vocabulary_is_refused_before_anything_starts(new_run, teacher):
    model = {"tokenizer": "task.py:other_tokenizer"}
    run = new_run(
        REWARDS, algorithm=PURE, teacher={"path": teacher}, model={**new_run().config.model.model_dump(), **model}
    )
    with pytest.raises(
        ConfigError, match=r"(?s)teacher's vocabulary differs.*'<think>' has id 16 in the policy, none in this model"
    ):
        run.train()
    assert run.executor.started == []
    assert not Path(run.config.trainer.output_dir).exists()


def test_a_teacher_that_sees_less_leaves_out_what_it_cannot_see(new_run, teacher):
    file = Path(teacher) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 6}))
    run = new_run(algorithm=PURE, teacher={"path": teacher})
    with pytest.raises(DataError, match=r"context"):
        run.train()
    assert run.executor.started == []
