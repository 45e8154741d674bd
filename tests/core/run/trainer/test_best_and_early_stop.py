"""What follows from validations: a checkpoint that is kept, and the end of a run."""

from __future__ import annotations

import json
import math

import pytest

from anytron.record.checkpoint.directory import Best, locate
from anytron.record.report.run import Run, State
from anytron.record.validation import set_metrics
from anytron.run.trainer import validation as examining
from tests.core.run.trainer.disturbed_runs import EVERY_STEP, comparable, output, steps
from tests.core.run.trainer.test_supervised import recorded_traces
from tests.core.run.trainer.validations import found, section


@pytest.fixture
def script(monkeypatch):
    """Let validations find what a test says, one value after the other."""

    def write(*values):
        left = list(values)

        def found(section, samples, rewards):
            return set_metrics(section, samples, rewards) | {section.mean_metric: left.pop(0)}

        monkeypatch.setattr(examining, "set_metrics", found)

    return write


BEST = section(every_steps=1, before_training=False, keep_best=True)


def test_the_best_checkpoint_is_kept_found_and_resumed_from(new_run, script, tmp_path):
    script(0.2, 0.7, 0.5, 0.7, 0.1)
    trainer = {"total_steps": 5, "log_samples": 64}
    path = new_run(trainer=trainer, checkpoint={**EVERY_STEP, "keep": 1}, validation=BEST).train().output_dir
    assert steps(path) == [2, 5]
    best = Best.read(path / "checkpoints")
    assert (best.step, best.metric, best.value) == (2, "validation/digits/mean@4", 0.7)
    assert locate(path / "checkpoints" / "best").step == 2
    branch = new_run(
        trainer={"total_steps": 3, "output_dir": str(tmp_path / "branch")}, resume=str(path / "checkpoints" / "best")
    ).train()
    assert comparable(branch.output_dir) == [comparable(path)[2]]


def test_it_is_saved_also_where_no_checkpoint_was_due(new_run, script):
    script(0.2, 0.7, 0.1, 0.9, 0.3)
    never = {"every_minutes": None, "keep": 1}
    path = new_run(trainer={"total_steps": 5}, checkpoint=never, validation=BEST).train().output_dir
    assert steps(path) == [4, 5]
    assert Best.read(path / "checkpoints").step == 4


def test_the_lowest_can_be_the_best(new_run, script):
    script(0.2, 0.1, 0.7)
    validation = {**BEST, "direction": "min"}
    path = new_run(trainer={"total_steps": 3}, validation=validation).train().output_dir
    assert Best.read(path / "checkpoints").step == 2


def test_a_run_that_is_killed_before_the_best_is_marked_marks_it_when_it_goes_on(new_run, script, monkeypatch):
    script(0.2, 0.7)
    sections = {"checkpoint": {**EVERY_STEP, "async": False, "keep": 1}, "validation": BEST}
    write = Best.write

    def die(best, directory):
        if best.step == 2:
            raise KeyboardInterrupt
        write(best, directory)

    monkeypatch.setattr(Best, "write", die)
    with pytest.raises(KeyboardInterrupt):
        new_run(trainer={"total_steps": 4}, **sections).train()
    path = output(new_run)
    assert Best.read(path / "checkpoints").step == 1
    monkeypatch.setattr(Best, "write", write)
    script(0.3, 0.4)  # step 2 was examined: that is not done again
    new_run(trainer={"total_steps": 4}, resume="auto", **sections).train()
    assert [record["validation/digits/mean@4"] for record in found(path)] == [0.2, 0.7, 0.3, 0.4]
    assert Best.read(path / "checkpoints").step == 2
    assert steps(path) == [2, 4]


def test_it_stops_early_says_why_and_goes_on_if_it_is_asked_to(new_run, script, monkeypatch):
    traces = recorded_traces(monkeypatch)
    script(0.1, 0.5, 0.55, 0.4, 0.6, 0.7, 0.8)
    own = {"every_steps": 1, "patience": 2, "min_delta": 0.1}
    profile = {"steps": [3, 4], "stacks": False}
    run = new_run(trainer={"total_steps": 6, "profile": profile}, validation=section(**own))
    summary = run.train()
    assert summary.steps == 3
    assert traces == ["begin_traces", "end_traces"], "the fourth step never begins"
    assert summary.early_stop == (
        "early stop after step 3: validation/digits/mean@4 was 0.5 after step 1 and did not improve by more than "
        "0.1 in 2 validations since (validation.patience)"
    )
    record = json.loads((summary.output_dir / "run.json").read_text())
    assert (record["finished_step"], record["early_stop"]) == (3, summary.early_stop)
    assert (summary.output_dir / "hf" / "model.safetensors").is_file()
    assert [record["step"] for record in found(summary.output_dir)] == [0, 1, 2, 3]
    assert Run(summary.output_dir).state is State.FINISHED
    again = new_run(trainer={"total_steps": 6}, validation=section(**own), resume="auto").train()
    assert (again.steps, again.early_stop) == (3, summary.early_stop), "nothing has changed"
    more = new_run(trainer={"total_steps": 6}, validation=section(**own | {"patience": 5}), resume="auto").train()
    assert (more.steps, more.early_stop) == (6, None)
    assert [record["step"] for record in found(summary.output_dir)] == [0, 1, 2, 3, 4, 5, 6]
    assert json.loads((summary.output_dir / "run.json").read_text())["early_stop"] is None


def test_a_metric_that_is_not_a_number_is_told_and_counts_as_no_better(new_run, script):
    script(math.nan, math.nan, math.nan)
    run = new_run(trainer={"total_steps": 4}, validation={**BEST, "patience": 3})
    summary = run.train()
    assert summary.steps == 3
    assert "was never a number" in summary.early_stop
    assert len([text for text in run.progress.warnings if "is not a number" in text]) == 3
    assert "is not a number" in (summary.output_dir / "logs" / "driver.log").read_text()
    assert Best.read(summary.output_dir / "checkpoints") is None
    assert math.isnan(found(summary.output_dir)[0]["validation/digits/mean@4"])
