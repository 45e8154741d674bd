"""Supervised fine-tuning: the real loop, without a rollout and without rewards."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from anytron.base.errors import ConfigError, DataError, ProcessLost
from anytron.record.checkpoint.directory import Best
from anytron.run.preflight.prepare import prepare_held_out, prepare_prompts
from anytron.run.trainer.workers import TrainingWorkers
from tests.core.run.trainer.disturbed_runs import EVERY_STEP, assert_equal, comparable, lines, output, raise_at, steps
from tests.core.run.trainer.validations import found

EXAMPLES = """
import dataclasses


def examples(**options):
    for prompt in prompts(**options):
        yield dataclasses.replace(prompt, data={"response": prompt.data["answer"]})
"""
SFT = {"algorithm": {"name": "sft"}, "rewards": [], "rollout": {}, "optimizer": {"lr": 3e-3}}
DATA = {"source": "task.py:examples", "options": {"count": 64, "digits": 3}, "prompts_per_step": 8}
HELD_OUT = {"name": "held_out", "data": {**DATA, "options": {"count": 11, "digits": 3, "seed": 99}}}
HELD_OUT["data"].pop("prompts_per_step")


@pytest.fixture
def new_sft(new_run):
    def make(**sections):
        return new_run(EXAMPLES, **{**SFT, "data": DATA, **sections})

    return make


def recorded_traces(monkeypatch):
    """The calls by which ranks begin and end traces, as they are made."""
    made = []
    for name in ("begin_traces", "end_traces"):

        def told(*arguments, name, really, **options):
            made.append(name)
            return really(*arguments, **options)

        spy = functools.partialmethod(told, name=name, really=getattr(TrainingWorkers, name))
        monkeypatch.setattr(TrainingWorkers, name, spy)
    return made


def labelled(examples):
    """A padded batch with Hugging Face's labels."""
    longest = max(len(one.tokens) for one in examples)
    tokens, labels, mask = (torch.full((len(examples), longest), fill) for fill in (0, -100, 0))
    for row, one in enumerate(examples):
        for place, (token, learnt) in enumerate(zip(one.tokens, one.response_mask, strict=True)):
            tokens[row, place], mask[row, place] = token, 1
            labels[row, place] = token if learnt else -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def test_it_is_the_training_that_hugging_face_would_do(new_sft):
    """The same examples, Hugging Face's own loss of labels in float64, and Adam: five steps."""
    run = new_sft(trainer={"total_steps": 5, "output_dir": str(output(new_sft))})
    summary = run.train()
    model = AutoModelForCausalLM.from_pretrained(summary.output_dir / "initial_model", dtype=torch.float64)
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    sampler = prepare_prompts(run.config).sampler
    for line in lines(summary.output_dir / "metrics.jsonl"):
        adam.zero_grad()
        loss = model(**labelled(sampler.draw(8))).loss
        loss.backward()
        assert line["loss/total"] == line["loss/nll"] == pytest.approx(loss.item(), rel=1e-5)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        adam.step()
    assert line["loss/nll"] < 2.6
    trained = load_file(summary.output_dir / "hf" / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.allclose(trained[name].double(), parameter, atol=2e-4), name
    assert summary.metrics["loss/nll"] == line["loss/nll"]


def test_nothing_is_generated_and_nothing_rewarded(new_sft):
    run = new_sft()
    summary = run.train()
    assert run.executor.started == ["trainer"]
    assert set(json.loads((summary.output_dir / "patches.json").read_text())) == {"trainer"}
    assert lines(summary.output_dir / "samples.jsonl") == []
    record = lines(summary.output_dir / "metrics.jsonl")[-1]
    assert not {name for name in record if name.startswith(("rollout/", "reward/"))}
    assert {"time/data_s", "time/update_s", "time/step_s", "throughput/tokens_per_s", "policy/entropy"} <= record.keys()
    assert record["data/epochs"] == 16 / 64
    assert record["response/length_mean"] == record["response/length_max"] == 4  # three digits and the end


def test_the_update_is_the_same_in_several_micro_batches(new_sft, tmp_path):
    whole, parts = (
        new_sft(
            engine={"max_tokens_per_micro_batch": size}, trainer={"total_steps": 3, "output_dir": str(tmp_path / name)}
        ).train()
        for name, size in (("whole", 4096), ("parts", 17))
    )
    for one, other in zip(comparable(whole.output_dir), comparable(parts.output_dir), strict=True):
        assert other == pytest.approx(one, rel=1e-4)


@pytest.mark.some(1)
@pytest.mark.parametrize("call", [1, 3, 5])
def test_a_run_that_is_killed_and_resumed_equals_one_that_was_not(new_sft, tmp_path, call):
    sections = {"validation": {"sets": [HELD_OUT], "every_steps": 2}}
    whole = new_sft(trainer={"total_steps": 5, "output_dir": str(tmp_path / "whole")}, **sections).train().output_dir
    trainer = {"total_steps": 5, "output_dir": str(tmp_path / "run")}
    killed = new_sft(trainer=trainer, checkpoint={"every_steps": 2, "async": False}, **sections)
    raise_at(killed, call)
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    assert new_sft(trainer=trainer, resume="auto", **sections).train().steps == 5
    assert found(tmp_path / "run") == found(whole)
    assert_equal(tmp_path / "run", (comparable(whole), [], load_file(whole / "hf" / "model.safetensors")))


def test_a_rank_that_is_lost_is_started_again(new_sft, tmp_path):
    whole = new_sft(trainer={"total_steps": 4, "output_dir": str(tmp_path / "whole")}).train().output_dir
    run = new_sft(trainer={"total_steps": 4, "output_dir": str(tmp_path / "run")}, checkpoint=EVERY_STEP)
    raise_at(run, 3, ProcessLost("A process was killed."))
    run.train()
    assert run.executor.started == ["trainer"] * 2
    assert comparable(tmp_path / "run") == comparable(whole)


def test_examples_that_have_changed_are_noticed(new_sft, tmp_path):
    """Also where the tokens are the same, and others of them are learnt."""
    trainer = {"total_steps": 2, "output_dir": str(tmp_path / "run")}
    data = {"source": "jsonl", "options": {"path": str(tmp_path / "examples.jsonl")}}
    (tmp_path / "examples.jsonl").write_text(json.dumps({"prompt": [3, 1, 10], "response": [1, 3, 11]}) + "\n")
    new_sft(trainer=trainer, data=data).train()
    (tmp_path / "examples.jsonl").write_text(json.dumps({"prompt": [3, 1], "response": [10, 1, 3, 11]}) + "\n")
    with pytest.raises(DataError, match="The prompts have changed"):
        new_sft(trainer={**trainer, "total_steps": 3}, data=data, resume="auto").train()


def test_the_held_out_loss_is_hugging_faces(new_sft):
    run = new_sft(validation={"sets": [HELD_OUT], "every_steps": 2, "before_training": True, "keep_best": True})
    summary = run.train()
    records = lines(summary.output_dir / "validation.jsonl")
    assert [record["step"] for record in records] == [0, 2]
    examples = prepare_held_out(run.config, prepare_prompts(run.config))[0].prepared.sampler
    batch = labelled(examples.draw(11))
    for record, directory in zip(records, ("initial_model", "hf"), strict=True):
        model = AutoModelForCausalLM.from_pretrained(summary.output_dir / directory, dtype=torch.float64)
        with torch.no_grad():
            assert record["validation/held_out/loss"] == pytest.approx(model(**batch).loss.item(), rel=1e-5)
    assert Best.read(summary.output_dir / "checkpoints").direction == "min"
    assert any(note.startswith("validation after step 2: held_out/loss ") for note in run.progress.notes)


def test_it_ends_when_the_held_out_loss_does_not_fall(new_sft, monkeypatch):
    traces = recorded_traces(monkeypatch)
    run = new_sft(
        trainer={"total_steps": 9, "output_dir": str(output(new_sft)), "profile": {"steps": [3, 4], "stacks": False}},
        validation={"sets": [HELD_OUT], "every_steps": 1, "patience": 2, "min_delta": 5.0},
    )
    summary = run.train()
    assert summary.steps == 3
    assert "held_out/loss" in summary.early_stop
    assert steps(summary.output_dir) == [3]
    assert traces == ["begin_traces", "end_traces"], "the fourth step never begins"


def test_a_plot_of_the_loss_is_drawn(new_sft):
    summary = new_sft(tracking={"plot": True}).train()
    assert [file.name for file in (summary.output_dir / "plots").iterdir()] == ["loss.png"]


def test_rewards_are_needed_by_those_who_are_rewarded(new_run):
    with pytest.raises(ValueError, match=r"rewards is required.*algorithm.name=sft"):
        new_run(rewards=[])


def test_a_criterion_of_the_other_kind_is_refused(new_sft):
    with pytest.raises(ValueError, match=r"validation/held_out/mean@1, but algorithm.name=sft measures losses"):
        new_sft(validation={"sets": [HELD_OUT], "metric": "validation/held_out/mean@1"})


def test_the_model_must_have_room_for_examples(new_sft):
    with pytest.raises((ConfigError, DataError), match=r"(?s)Every prompt of a source was left out.*4 tokens"):
        new_sft(data={**DATA, "max_prompt_tokens": 4}).train()
