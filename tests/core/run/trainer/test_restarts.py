"""Processes are lost, and the run goes on: real training, groups that lose their process when a test says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from anytron.base.errors import ProcessLost, WorkerError
from tests.core.run.trainer.conftest import Answer
from tests.core.run.trainer.disturbed_runs import comparable, lines

if TYPE_CHECKING:
    from pathlib import Path

LOST = "Trainer rank 0 failed in update(): it was killed by SIGKILL."


def results(path: Path) -> tuple:
    """Metrics without what the clock says, samples, and the bytes of the model."""
    return comparable(path), lines(path / "samples.jsonl"), (path / "hf" / "model.safetensors").read_bytes()


def lose(run, calls: dict[str, set[int]], error=ProcessLost):
    """Let the n-th calls of methods lose their process; calls are counted over all processes of the run."""
    counts = dict.fromkeys(calls, 0)
    start = run.executor.start

    class Group:
        def __init__(self, group):
            self.group, self.size, self.ended = group, group.size, False

        def submit(self, name, *args, **kwargs):
            return Answer(lambda: [self.meet_fate(name), self.group.call(name, *args, **kwargs)][1])

        def call(self, name, *args, **kwargs):
            return self.submit(name, *args, **kwargs).result()

        def end(self):
            self.ended = True

        def submit_each(self, name, shares):
            return Answer(lambda: [self.meet_fate(name), self.group.scatter(name, shares)][1])

        def scatter(self, name, shares):
            return self.submit_each(name, shares).result()

        def meet_fate(self, name):
            assert not self.ended, "a group that has lost a process is not called again"
            if name in calls:
                counts[name] += 1
                if counts[name] in calls[name]:
                    self.ended = True
                    raise error(LOST, why="the last lines it wrote", fix="more memory")

    run.executor.start = lambda spec: Group(start(spec))


ALWAYS = set(range(100))


@pytest.fixture
def four_steps(new_run, tmp_path):
    """Make runs of four steps in directories of their own."""

    def make(name, **sections):
        return new_run(trainer={"total_steps": 4, "output_dir": str(tmp_path / name)}, **sections)

    return make


@pytest.mark.some(1)
@pytest.mark.parametrize("every", [2, None], ids=["from-a-checkpoint", "from-the-beginning"])
def test_a_lost_training_rank_costs_time_and_nothing_else(four_steps, tmp_path, collections, every):
    four_steps("undisturbed").train()
    checkpoint = {"every_steps": every, "every_minutes": None}
    run = four_steps("run", checkpoint=checkpoint)
    lose(run, {"update": {4}, "save_hf": {1}})  # the second after the last step
    collections.clear()

    summary = run.train()

    assert collections == ["exempt", "collect"] * 3, "each attempt keeps what it prepared, and leaves nothing"

    assert summary.steps == 4
    assert results(tmp_path / "run") == results(tmp_path / "undisturbed")
    assert run.executor.started == ["trainer", "rollout"] * 3
    assert run.executor.ended == 2
    first, second = lines(tmp_path / "run" / "losses.jsonl")
    assert (first["after_step"], first["lost"]) == (3, LOST)
    assert (second["after_step"], second["in_a_row"]) == (4, 1)
    assert any(LOST in note and "1 of 3 in a row" in note for note in run.progress.notes)


def test_a_lost_rollout_process_is_replaced_and_samples_the_same_again(four_steps, tmp_path):
    four_steps("undisturbed").train()
    run = four_steps("run")
    lose(run, {"poll": {2, 3}, "load_weights": {1, 5}})

    run.train()

    assert results(tmp_path / "run") == results(tmp_path / "undisturbed")
    assert run.executor.started == ["trainer", "rollout", *["rollout"] * 4], "training ranks live on"
    assert [one["then"] for one in lines(tmp_path / "run" / "losses.jsonl")] == ["another process takes its place"] * 4


def test_what_is_lost_one_step_ahead_is_made_again_with_the_weights_that_it_had(four_steps, tmp_path):
    ahead = {"max_staleness": 1, "replicas": 2}
    four_steps("undisturbed", rollout=ahead).train()
    run = four_steps("run", rollout=ahead)
    lose(run, {"poll": {3, 7}, "load_weights": {5}})

    run.train()

    assert results(tmp_path / "run") == results(tmp_path / "undisturbed")
    assert len(lines(tmp_path / "run" / "losses.jsonl")) == 3


@pytest.mark.parametrize("method", ["update", "poll"])
def test_what_is_lost_again_and_again_ends_the_run(four_steps, tmp_path, method):
    run = four_steps("run", checkpoint={"every_steps": 1, "async": False})
    lose(run, {method: ALWAYS - {0, 1, 2}})  # every time in the third step

    with pytest.raises(WorkerError, match="SIGKILL") as caught:
        run.train()

    assert type(caught.value) is WorkerError
    assert "more memory; this was loss number 4 in a row without a completed step" in caught.value.fix
    losses = lines(tmp_path / "run" / "losses.jsonl")
    assert [(one["after_step"], one["in_a_row"]) for one in losses] == [(2, 1), (2, 2), (2, 3), (2, 4)]
    assert losses[-1]["then"] == "the run ends"
    assert [record["step"] for record in lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


def test_without_restarts_the_first_loss_is_an_error(new_run):
    run = new_run(trainer={"max_restarts": 0})
    lose(run, {"update": {1}})

    with pytest.raises(WorkerError, match="SIGKILL") as caught:
        run.train()

    assert caught.value.fix == "more memory"
    assert run.executor.started == ["trainer", "rollout"]


def test_a_rank_that_raised_would_raise_again(new_run):
    run = new_run()
    lose(run, {"update": {1}}, error=WorkerError)

    with pytest.raises(WorkerError):
        run.train()

    assert run.executor.started == ["trainer", "rollout"]
