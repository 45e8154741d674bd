"""Runs that validate: real loop, real generation, real reward processes. Training goes on as if they did not."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from typing import ClassVar

import pytest
from safetensors.torch import load_file

from anytron.base.errors import ConfigError, DataError
from anytron.record.checkpoint.directory import Best
from anytron.record.validation import set_metrics
from anytron.run.preflight import prepare as sets
from anytron.run.trainer import validation as examining
from anytron.task.rewards.scoring import RewardWorkers
from tests.core.run.trainer.disturbed_runs import EVERY_STEP, assert_equal, comparable, lines, output, steps
from tests.core.run.trainer.validations import found, section

STATEFUL = """
import random

calls = []
noise = random.Random(0)


def remembering(samples):
    calls.append(len(samples))
    return [reward([sample])[0] + 0.01 * len(calls) + 0.001 * noise.random() for sample in samples]
"""
"""A reward that remembers how often it was called, and has a random generator of its own."""


def without_validation(path):
    """Let a run's samples be those of training alone."""
    kept = [record for record in lines(path / "samples.jsonl") if "validation" not in record]
    (path / "samples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept))


def test_it_examines_before_training_every_so_often_and_at_the_end(new_run):
    run = new_run(trainer={"total_steps": 5, "log_samples": 3}, validation=section())
    summary = run.train()
    records = lines(summary.output_dir / "validation.jsonl")
    assert [record["step"] for record in records] == [0, 2, 4, 5]
    for record in records:
        assert record.keys() == {
            "step",
            "validation/digits/mean@4",
            "validation/digits/mean@4/low",
            "validation/digits/mean@4/high",
            "validation/digits/pass@1",
            "validation/digits/pass@1/low",
            "validation/digits/pass@1/high",
            "validation/digits/pass@4",
            "validation/digits/pass@4/low",
            "validation/digits/pass@4/high",
            "validation/digits/response/length_mean",
            "validation/digits/response/truncated_fraction",
            "validation/digits/failed",
            "validation/time_s",
        }
        for name in ("mean@4", "pass@1", "pass@4"):
            low, value, high = (record[f"validation/digits/{name}{end}"] for end in ("/low", "", "/high"))
            assert low <= value <= high
        assert record["validation/digits/pass@4"] > record["validation/digits/pass@1"]
    assert [note for note in run.progress.notes if note.startswith("validation after step 4: digits/mean@4 0.")]
    timed = [record["step"] for record in lines(summary.output_dir / "metrics.jsonl") if "time/validation_s" in record]
    assert timed == [1, 3, 5], "it is a part of the step that follows"
    samples = [record for record in lines(summary.output_dir / "samples.jsonl") if "validation" in record]
    assert [record["step"] for record in samples] == [0] * 3 + [2] * 3 + [4] * 3 + [5] * 3
    assert {record["validation"] for record in samples} == {"digits"}
    assert len({record["prompt_id"] for record in samples}) == 3, "the same prompts each time, to compare"


def test_the_numbers_are_those_of_its_responses(new_run):
    whole = section(max_new_tokens=2, temperature=0.7)
    path = new_run(trainer={"total_steps": 1, "log_samples": 64}, validation=whole).train().output_dir
    for record in lines(path / "validation.jsonl"):
        samples = [
            one for one in lines(path / "samples.jsonl") if one.get("validation") and one["step"] == record["step"]
        ]
        assert len(samples) == 6 * 4
        assert max(len(one["response_tokens"]) for one in samples) == 2
        rewards = [one["reward"] for one in samples]
        groups = [rewards[start : start + 4] for start in range(0, 24, 4)]
        assert record["validation/digits/mean@4"] == pytest.approx(sum(rewards) / 24)
        assert record["validation/digits/pass@1"] == pytest.approx(sum(one >= 0.3 for one in rewards) / 24)
        assert record["validation/digits/pass@4"] == pytest.approx(sum(max(group) >= 0.3 for group in groups) / 6)
        cut = sum(not one["finished"] for one in samples) / 24
        assert record["validation/digits/response/truncated_fraction"] == pytest.approx(cut)


def test_greedy_responses_to_a_prompt_are_all_the_same(new_run):
    run = new_run(trainer={"total_steps": 1, "log_samples": 64}, validation=section(top_k=1))
    samples = [one for one in lines(run.train().output_dir / "samples.jsonl") if "validation" in one]
    assert len({(one["step"], one["prompt_id"], one["response"]) for one in samples}) == 2 * 6


DISTURBING = {
    "plain": {},
    "shuffled-and-stateful": {"rewards": [{"function": "task.py:remembering"}], "data": {"prompts_per_step": 24}},
    "ahead": {"rollout": {"max_staleness": 1}},
}


@pytest.mark.some(1)
@pytest.mark.parametrize("sections", DISTURBING.values(), ids=DISTURBING)
def test_a_run_learns_the_same_with_and_without(new_run, tmp_path, sections):
    assert differs(new_run, tmp_path, sections) == []


def differs(new_run, tmp_path, sections):
    """What of a run is another with validation: metrics, samples, weights."""
    runs = []
    for name, own in (("without", None), ("with", section(samples_per_prompt=5, temperature=1.7))):
        trainer = {"total_steps": 4, "output_dir": str(tmp_path / name), "log_samples": 64}
        runs.append(new_run(STATEFUL, trainer=trainer, validation=own, **sections).train().output_dir)
    without_validation(runs[1])
    assert [record["step"] for record in found(runs[1])] == [0, 2, 4]
    kinds = {
        "metrics": [comparable(path) for path in runs],
        "samples": [lines(path / "samples.jsonl") for path in runs],
        "weights": [
            {name: tensor.tolist() for name, tensor in load_file(path / "hf" / "model.safetensors").items()}
            for path in runs
        ],
    }
    return [kind for kind, (one, other) in kinds.items() if one != other]


@pytest.mark.parametrize("sabotage", ["data", "rewards"])
def test_a_validation_that_shares_anything_with_training_is_noticed(new_run, tmp_path, monkeypatch, sabotage):
    whole = sets._prepare_set

    def prepare(section, key, config, prepared):
        made = whole(section, key, config, prepared)
        if sabotage == "data":
            object.__setattr__(made.prepared, "sampler", Leaky(prepared.sampler, len(made.prepared.sampler)))
        else:
            object.__setattr__(made.prepared, "rewards", Shared())
        return made

    class Leaky:
        """Validation's prompts are the next ones of training."""

        def __init__(self, sampler, count):
            self.sampler, self.count = sampler, count

        def __len__(self):
            return self.count

        tables = ()
        remarks = ()

        def seek(self, places):
            pass

        def draw(self, count):
            return self.sampler.draw(count)

    class Shared:
        """The functions are called in training's processes."""

        sections: ClassVar = {}  # so that none is rehearsed

        def start(self, logs, timeout):
            class Open:
                def __enter__(self):
                    return Shared.workers

                def __exit__(self, *exception):
                    pass

            return Open()

    enter = RewardWorkers.__enter__

    def remember(workers):
        Shared.workers = workers
        return enter(workers)

    monkeypatch.setattr(RewardWorkers, "__enter__", remember)
    monkeypatch.setattr(sets, "_prepare_set", prepare)
    assert differs(new_run, tmp_path, DISTURBING["shuffled-and-stateful"]) != []


def test_nothing_of_training_is_under_way_during_a_validation(new_run, monkeypatch):
    held = []
    examine = examining.Validation._examine

    def watch(self, one, step):
        held.append(len(self.pool._queue) + sum(len(replica.held) for replica in self.pool._replicas))
        return examine(self, one, step)

    monkeypatch.setattr(examining.Validation, "_examine", watch)
    rollout = {"max_staleness": 2, "continue_over_updates": True}
    new_run(trainer={"total_steps": 5}, rollout=rollout, validation=section()).train()
    assert held == [0, 0, 0, 0]


def test_conversations_are_examined_and_training_goes_on_as_without(new_calculator, tmp_path):
    data = {"source": new_calculator().config.data.source, "options": {"count": 5, "seed": 5}}
    examined = {"sets": [{"name": "sums", "data": data}], "every_steps": 1}
    rollout = {"samples_per_prompt": 8, "max_staleness": 1}
    whole = []
    for name, own in (("without", None), ("with", examined)):
        trainer = {"total_steps": 3, "output_dir": str(tmp_path / name)}
        whole.append(new_calculator(trainer=trainer, validation=own, rollout=rollout).train())
    assert comparable(whole[0].output_dir) == comparable(whole[1].output_dir)
    assert [record["step"] for record in found(whole[1].output_dir)] == [1, 2, 3]


@pytest.mark.slow
def test_a_run_that_is_killed_in_a_validation_validates_again_and_ends_as_if_it_had_not_been(
    new_run, tmp_path, monkeypatch
):
    sections = {"checkpoint": EVERY_STEP, "validation": section(keep_best=True)}
    whole = new_run(trainer={"total_steps": 5, "output_dir": str(tmp_path / "whole")}, **sections).train().output_dir
    path = output(new_run)
    # In the validations before training, after step 2, after step 4.
    for resume, count in (("never", 1), ("auto", 2), ("auto", 2)):
        run = new_run(trainer={"total_steps": 5}, resume=resume, **sections)
        kill_in_validation(run, count, monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            run.train()
    assert [record["step"] for record in found(path)] == [0, 2]
    new_run(trainer={"total_steps": 5}, resume="auto", **sections).train()
    assert found(path) == found(whole)
    assert Best.read(path / "checkpoints") == Best.read(whole / "checkpoints")
    undisturbed = comparable(whole), lines(whole / "samples.jsonl"), load_file(whole / "hf" / "model.safetensors")
    assert_equal(path, undisturbed)


def kill_in_validation(run, count, monkeypatch):
    """Let a run end as if it were killed, in its n-th validation, when responses are there and nothing is written."""
    seen = []

    def die(*arguments):
        seen.append(None)
        if len(seen) == count:
            raise KeyboardInterrupt
        return set_metrics(*arguments)

    monkeypatch.setattr(examining, "set_metrics", die)
    train = run.train
    run.train = lambda: train_and_restore(train, monkeypatch)


def train_and_restore(train, monkeypatch):
    try:
        return train()
    finally:
        monkeypatch.setattr(examining, "set_metrics", set_metrics)


@pytest.mark.slow
def test_a_signal_in_a_validation_saves_and_the_validation_is_done_on_resuming(new_run, undisturbed, monkeypatch):
    whole = undisturbed(3)
    sections = {"trainer": {"total_steps": 3}, "validation": section(every_steps=1, before_training=False)}

    def stop(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return set_metrics(*arguments)

    monkeypatch.setattr(examining, "set_metrics", stop)
    for done in (1, 2, 3):
        run = new_run(**sections, resume="auto")
        if done > 1:  # it goes on with the validation that was given up, and is stopped in the next one
            stop_at = iter([set_metrics, stop])
            monkeypatch.setattr(examining, "set_metrics", partial(call_next, stop_at))
        summary = run.train()
        assert (summary.steps, summary.stopped_by) == (done, "SIGTERM")
        assert steps(output(new_run))[-1] == done
    monkeypatch.setattr(examining, "set_metrics", set_metrics)
    path = new_run(**sections, resume="auto").train().output_dir
    assert [record["step"] for record in found(path)] == [1, 2, 3]
    without_validation(path)
    assert_equal(path, whole)


def call_next(functions, *arguments):
    return next(functions)(*arguments)


def test_a_set_without_prompts_or_with_a_source_that_fails_is_refused_before_anything_starts(new_run):
    for source, error in (("nothing", "There are no prompts"), ("broken", "A source of prompts raised")):
        code = "def nothing():\n    return []\n\ndef broken():\n    raise RuntimeError('why')\n"
        run = new_run(code, validation=section(data={"source": f"task.py:{source}"}))
        with pytest.raises(DataError, match=f"(?s){error}.*validation set digits: "):
            run.train()
        assert run.executor.started == []
        assert not output(new_run).exists()


def test_a_prompt_that_leaves_no_room_for_a_longer_response_is_refused(new_run):
    run = new_run(validation=section(max_new_tokens=30))
    with pytest.raises(DataError, match=r"(?s)Every prompt of a source was left out.*validation set digits: "):
        run.train()
    assert run.executor.started == []


def test_rewards_of_a_set_are_its_own_and_what_is_wrong_with_them_is_told_of_the_set(new_run):
    code = (
        "def half(samples):\n    return [0.5 for _ in samples]\n\n"
        "def broken(samples):\n    if any(any(one.log_probs) for one in samples):\n        raise RuntimeError('why')\n"
        "    return [0.5 for _ in samples]\n"
    )
    run = new_run(code, trainer={"total_steps": 1}, validation=section(rewards=[{"function": "task.py:half"}]))
    path = run.train().output_dir
    assert found(path)[0]["validation/digits/mean@4"] == 0.5
    assert comparable(path)[0]["reward/mean"] != 0.5
    trainer = {"total_steps": 1, "overwrite": True}
    wrong = [{"function": "task.py:half", "options": {"x": 1}}]
    with pytest.raises(ConfigError, match=r"(?s)does not accept the arguments.*validation set digits: rewards\[0\]"):
        new_run(code, trainer=trainer, validation=section(rewards=wrong)).train()
    with pytest.raises(DataError, match=r"(?s)validation set digits: reward broken.*why"):
        new_run(code, trainer=trainer, validation=section(rewards=[{"function": "task.py:broken"}])).train()
    samples = lines(path / "samples.jsonl")
    assert len(samples) == 24, "all of them, to look at"
    assert {record["validation"] for record in samples} == {"digits"}


def test_a_run_from_another_ones_checkpoint_validates_before_its_first_step_only_if_it_is_asked_to(new_run, tmp_path):
    new_run().train()
    for before, expected in ((True, [2, 3, 4]), (False, [3, 4])):
        own = section(every_steps=1, before_training=before)
        trainer = {"total_steps": 4, "output_dir": str(tmp_path / f"branch-{before}")}
        path = new_run(trainer=trainer, validation=own, resume=str(output(new_run))).train().output_dir
        assert [record["step"] for record in found(path)] == expected
