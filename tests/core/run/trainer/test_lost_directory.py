"""The directory of a run disappears while the run goes on: an error within a step, and nothing trained is lost."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from anytron.base.errors import LostDirectoryError, ProcessLost
from anytron.base.files import Lock
from anytron.config.load import read_config
from anytron.record.tracking.run_directory import RunDirectory
from tests.core.run.trainer.conftest import Run
from tests.core.run.trainer.disturbed_runs import EVERY_STEP, assert_equal, lines, output, raise_at, steps

STEPS = 3


def removed(path):
    shutil.rmtree(path)


def moved(path):
    path.rename(path.with_name("elsewhere"))


def claimed_by_another(path):
    removed(path)
    path.mkdir()
    claimed_by_another.lock = Lock(path / ".lock")  # held: the other run goes on
    (path / "run.json").write_text("of the other run")


def after_step(run, step, harm):
    """Harm the run's directory when the metrics of a step are written."""
    shown = run.progress.step

    def stepped(metrics):
        shown(metrics)
        if metrics["step"] == step:
            harm(Path(run.config.trainer.output_dir))

    run.progress.step = stepped


def rescued_from(error):
    """The configuration that an error says the run goes on with; its words are used as they stand."""
    command = shlex.split(error.fix.partition(": ")[2])
    assert command[:2] == ["anytron", "train"]
    return read_config(Path(command[2]), command[3:])[0]


def lost(run):
    with pytest.raises(LostDirectoryError) as raised:
        run.train()
    return raised.value


def test_it_is_found_within_a_step_and_the_run_goes_on_elsewhere(new_run, undisturbed):
    run = new_run(trainer={"total_steps": STEPS, "output_dir": str(output(new_run))}, checkpoint=EVERY_STEP)
    after_step(run, 1, moved)
    error = lost(run)
    assert [metrics["step"] for metrics in run.progress.steps] == [1]
    assert str(output(new_run)) in error.where
    config = rescued_from(error)
    rescued = Path(config.trainer.output_dir)
    assert not output(new_run).exists()
    assert rescued.parent == output(new_run).parent
    assert steps(rescued) == [1]
    assert len(lines(rescued / "metrics.jsonl")) == 1
    assert "removed or replaced" in json.loads((rescued / "run.json").read_text())["failure"]
    Run(config).train()
    assert_equal(rescued, undisturbed(STEPS))


def test_another_run_that_claims_the_directory_is_left_alone(new_run):
    run, path = new_run(trainer={"total_steps": STEPS, "output_dir": str(output(new_run))}), output(new_run)
    after_step(run, 1, claimed_by_another)
    error = lost(run)
    assert "writes there" in error.why
    assert {file.name for file in path.iterdir()} == {".lock", "run.json"}
    assert (path / "run.json").read_text() == "of the other run"
    claimed_by_another.lock.release()
    assert steps(Path(rescued_from(error).trainer.output_dir)) == [1]


def test_it_is_found_without_checkpoints_too_and_before_the_model_is_saved(new_run):
    run = new_run(trainer={"output_dir": str(output(new_run))}, checkpoint={"keep": 0})
    last = run.config.trainer.total_steps
    after_step(run, last, removed)
    config = rescued_from(lost(run))
    assert steps(Path(config.trainer.output_dir)) == [last]
    assert not output(new_run).exists()


def test_the_directory_of_checkpoints_may_be_another(new_run, tmp_path):
    checkpoint = EVERY_STEP | {"path": str(tmp_path / "kept")}
    run = new_run(trainer={"total_steps": STEPS, "output_dir": str(output(new_run))}, checkpoint=checkpoint)
    after_step(run, 1, lambda path: removed(tmp_path / "kept"))
    error = lost(run)
    assert "directory of checkpoints" in error.what
    config = rescued_from(error)
    assert config.checkpoint.path is None
    assert steps(Path(config.trainer.output_dir)) == [1]


def test_a_save_that_is_under_way_does_not_hold_it_up(new_run):
    """Its files are gone with the directory: ranks that are asked for them fail, and nothing can be saved any more."""
    run = new_run(trainer={"total_steps": STEPS, "output_dir": str(output(new_run))}, checkpoint=EVERY_STEP)
    start = run.executor.start

    def started(spec):
        group = start(spec)
        if spec.role == "trainer":
            save, engine = group.engine.save_checkpoint, group.engine

            def begin(path, *, asynchronous):
                save(path, asynchronous=asynchronous)
                if asynchronous and "/step-000001/training-" in path:
                    removed(output(new_run))

            def written(*, wait):
                group.ended = not (engine.saved / "state.pt").exists()  # an error of a rank ends all of them
                return type(engine).written_files(engine, wait=wait)

            engine.save_checkpoint, engine.written_files = begin, written
        return group

    run.executor.start = started
    error = lost(run)
    assert steps(Path(rescued_from(error).trainer.output_dir)) == [1]


def test_in_the_middle_of_an_update_the_weights_are_saved(new_run):
    run = new_run(trainer={"total_steps": STEPS, "output_dir": str(output(new_run))})

    class HarmError(Exception):
        def __init__(self):
            removed(output(new_run))

    raise_at(run, 2, error=HarmError)
    error = lost(run)
    (path,) = output(new_run).parent.glob("run.rescued-*")
    assert str(path / "hf") in error.fix
    assert (load_file(path / "hf" / "model.safetensors")["lm_head.weight"]).isfinite().all()
    assert [record["step"] for record in lines(path / "metrics.jsonl")] == [1]


def test_a_run_does_not_start_again_in_another_directory_after_a_loss(new_run):
    run = new_run(trainer={"total_steps": STEPS, "output_dir": str(output(new_run))}, checkpoint=EVERY_STEP)
    raise_at(run, 2, error=ProcessLost("A rank is gone."))
    run.executor.end = lambda: removed(output(new_run))
    assert "A rank is gone." in lost(run).why
    assert not output(new_run).exists()


def test_a_run_that_does_not_look_would_be_noticed(new_run, monkeypatch):
    """The twin: a run that does not look at its boundaries goes on to its end, as if nothing had been."""
    run = new_run(trainer={"total_steps": STEPS, "output_dir": str(output(new_run))})
    monkeypatch.setattr(RunDirectory, "require_place", lambda self: None)
    after_step(run, 1, removed)
    assert run.train().steps == STEPS
