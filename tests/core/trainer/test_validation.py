"""Runs that validate: real loop, real generation, real reward processes. Training goes on as if they did not."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from anytron.checkpoint.best import Best
from anytron.preflight import validation as sets
from anytron.trainer import validation as examining
from tests.core.trainer.disturbed_runs import EVERY_STEP, assert_equal, lines, output
from tests.core.trainer.test_environments import new_calculator

__all__ = ["new_calculator"]  # a fixture

STATEFUL = """
import random

calls = []
noise = random.Random(0)


def remembering(samples):
    calls.append(len(samples))
    return [reward([sample])[0] + 0.01 * len(calls) + 0.001 * noise.random() for sample in samples]
"""
"""A reward that remembers how often it was called, and has a random generator of its own."""


def section(**keys):
    digits = {
        "name": "digits",
        "data": {"source": "task.py:prompts", "options": {"count": 6, "digits": 3, "seed": 99}},
        "samples_per_prompt": 4,
        "pass_at": [1, 4],
        "pass_threshold": 0.3,
    }
    own = {name: keys.pop(name) for name in [*keys] if name not in SECTION}
    return {"sets": [digits | own], "every_steps": 2, "before_training": True} | keys


SECTION = {"sets", "every_steps", "before_training", "metric", "direction", "keep_best", "patience", "min_delta"}


def found(path):
    """Validations without what the clock says."""
    return [
        {name: value for name, value in record.items() if name != "validation/time_s"}
        for record in lines(path / "validation.jsonl")
    ]


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


def comparable(path):
    return [
        {key: value for key, value in record.items() if not key.startswith(("time/", "throughput/"))}
        for record in lines(path / "metrics.jsonl")
    ]


@pytest.mark.parametrize("sabotage", ["data", "rewards"])
def test_a_validation_that_shares_anything_with_training_is_noticed(new_run, tmp_path, monkeypatch, sabotage):
    whole = sets._prepare_set

    def prepare(section, config, prepared):
        made = whole(section, config, prepared)
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

        def seek(self, epoch, position):
            pass

        def draw(self, count):
            return self.sampler.draw(count)

    class Shared:
        """The functions are called in training's processes."""

        def start(self, logs, timeout):
            class Open:
                def __enter__(self):
                    return Shared.workers

                def __exit__(self, *exception):
                    pass

            return Open()

    from anytron.rewards.scoring import RewardWorkers

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
        held.append(len(self._pool._queue) + sum(len(replica.held) for replica in self._pool._replicas))
        return examine(self, one, step)

    monkeypatch.setattr(examining.Validation, "_examine", watch)
    rollout = {"max_staleness": 2, "continue_over_updates": True}
    new_run(trainer={"total_steps": 5}, rollout=rollout, validation=section()).train()
    assert held == [0, 0, 0, 0]


def test_conversations_are_examined_and_training_goes_on_as_without(new_calculator, tmp_path):
    examined = {
        "sets": [
            {
                "name": "sums",
                "data": {
                    **new_calculator().config.data.model_dump(include={"source"}),
                    "options": {"count": 5, "seed": 5},
                },
            }
        ],
        "every_steps": 1,
    }
    whole = []
    for name, own in (("without", None), ("with", examined)):
        trainer = {"total_steps": 3, "output_dir": str(tmp_path / name)}
        whole.append(
            new_calculator(
                trainer=trainer, validation=own, rollout={"samples_per_prompt": 8, "max_staleness": 1}
            ).train()
        )
    assert comparable(whole[0].output_dir) == comparable(whole[1].output_dir)
    assert [record["step"] for record in found(whole[1].output_dir)] == [1, 2, 3]


def test_a_run_that_is_killed_in_a_validation_validates_again_and_ends_as_if_it_had_not_been(new_run, tmp_path):
    sections = {"checkpoint": EVERY_STEP, "validation": section(keep_best=True)}
    whole = new_run(trainer={"total_steps": 5, "output_dir": str(tmp_path / "whole")}, **sections).train().output_dir
    path = output(new_run)
    for resume, total in (
        ("never", 1),
        ("auto", 2),
        ("auto", 2),
    ):  # in the validations before training, after 2, after 4
        run = new_run(trainer={"total_steps": 5}, resume=resume, **sections)
        kill_in_validation(run, total)
        with pytest.raises(KeyboardInterrupt):
            run.train()
    assert [record["step"] for record in found(path)] == [0, 2]
    new_run(trainer={"total_steps": 5}, resume="auto", **sections).train()
    assert found(path) == found(whole)
    assert Best.read(path / "checkpoints") == Best.read(whole / "checkpoints")
    undisturbed = comparable(whole), lines(whole / "samples.jsonl"), load_file(whole / "hf" / "model.safetensors")
    assert_equal(path, undisturbed)


def kill_in_validation(run, count):
    """Let a run end as if it were killed, in its n-th validation, when responses are there and nothing is written."""
    original, seen = examining.set_metrics, []

    def die(*arguments):
        seen.append(None)
        if len(seen) == count:
            raise KeyboardInterrupt
        return original(*arguments)

    run.executor.start = with_attribute(run.executor.start, lambda: setattr(examining, "set_metrics", die))


def with_attribute(function, then):
    def call(*arguments):
        then()
        return function(*arguments)

    return call


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    monkeypatch.setattr(examining, "set_metrics", examining.set_metrics)
