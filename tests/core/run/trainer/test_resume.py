"""Runs that end early and are continued: the real loop, real training, checkpoints on disk."""

from __future__ import annotations

import json
import time

import pytest
from safetensors.torch import load_file

from anytron.base.errors import CheckpointError, ConfigError, DataError, ResourceError, WorkerError
from anytron.record.checkpoint.differences import REMEDIES
from tests.core.run.trainer.disturbed_runs import EVERY_STEP, assert_equal, comparable, lines, output, raise_at, steps

MIX = {
    "source": None,
    "options": {},
    "mix": [
        {
            "name": name,
            "source": "task.py:prompts",
            "options": {"count": count, "digits": 3, "seed": 4},
            "weight": weight,
        }
        for name, count, weight in (("few", 5, 3.0), ("many", 40, 2.0))
    ],
}


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "sections",
    [
        {},
        pytest.param({"algorithm": {"epochs": 2, "mini_batches": 2, "kl_coefficient": 0.1}}, marks=pytest.mark.slow),
        {"algorithm": {"advantage": "gae"}, "critic": {"warmup_steps": 3}, "data": {"prompts_per_step": 40}},
        {"data": MIX},
    ],
    ids=["grpo", "several-updates-and-kl", "critic-in-its-warm-up", "a-mix-of-prompts"],
)
def test_a_run_that_is_killed_and_resumed_equals_one_that_was_not(new_run, undisturbed, tmp_path, sections):
    whole = undisturbed(5, **sections)
    trainer = {"total_steps": 5, "output_dir": str(tmp_path / "run")}
    # In the fourth step; the last checkpoint is the second's.
    killed = new_run(trainer=trainer, checkpoint={"every_steps": 2, "async": False}, **sections)
    raise_at(killed, 4, method="poll")
    with pytest.raises(KeyboardInterrupt):
        killed.train()

    again = new_run(trainer=trainer, resume="auto", **sections)
    summary = again.train()

    assert summary.steps == 5
    assert_equal(tmp_path / "run", whole)


def test_an_asynchronous_save_is_complete_a_little_later_and_holds_the_state_of_its_step(new_run, undisturbed):
    whole = undisturbed(4)
    run = new_run(trainer={"total_steps": 4, "output_dir": str(output(new_run))}, checkpoint=EVERY_STEP)
    calls = raise_at(run, 3, method="update_critic")
    run.train()
    # Training has gone on between the beginning of a save and its end.
    first = calls.index("save_checkpoint")
    assert "export_weights" in calls[first : calls.index("written_files", calls.index("written_files") + 1)]
    assert calls.count("save_checkpoint") == 4
    assert steps(output(new_run)) == [3, 4]
    assert_equal(output(new_run), whole)


def test_metrics_say_how_long_training_stood_still(new_run):
    run = new_run(checkpoint=EVERY_STEP)
    run.train()
    assert all(record["time/checkpoint_s"] >= 0 for record in run.progress.steps)
    assert run.progress.steps[1]["time/checkpoint_s"] > run.progress.steps[0]["time/checkpoint_s"]


def test_total_steps_may_be_raised_when_a_run_is_finished(new_run, undisturbed):
    whole = undisturbed(5)
    trainer = {"total_steps": 3, "output_dir": str(output(new_run))}
    new_run(trainer=trainer).train()
    assert steps(output(new_run)) == [3]
    run = new_run(trainer={**trainer, "total_steps": 5}, resume="auto")
    run.train()
    assert_equal(output(new_run), whole)
    (resume,) = json.loads((output(new_run) / "run.json").read_text())["resumes"]
    assert resume["step"] == 3
    assert {"key": "trainer.total_steps", "old": 3, "new": 5} in resume["changes"]
    assert "changed since the checkpoint: trainer.total_steps was 3 and is 5" in run.progress.notes


def test_a_finished_run_is_not_trained_again(new_run):
    new_run().train()
    before = (output(new_run) / "metrics.jsonl").read_bytes()
    run = new_run(resume="auto")
    summary = run.train()
    assert (summary.steps, run.executor.started) == (2, [])
    assert "the run has finished" in run.progress.notes[-1]
    assert (output(new_run) / "metrics.jsonl").read_bytes() == before


def test_in_an_empty_directory_auto_begins_a_run(new_run, undisturbed):
    whole = undisturbed(2)
    run = new_run(resume="auto")
    run.train()
    assert_equal(output(new_run), whole)
    assert "nothing to resume" in run.progress.notes[0]


def test_a_run_that_has_no_checkpoint_yet_begins_again(new_run, undisturbed):
    whole = undisturbed(3)
    trainer = {"total_steps": 3, "output_dir": str(output(new_run))}
    killed = new_run(trainer=trainer)
    raise_at(killed, 2)
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    assert len(lines(output(new_run) / "metrics.jsonl")) == 1
    new_run(trainer=trainer, resume="auto").train()
    assert_equal(output(new_run), whole)


def test_a_change_that_makes_it_another_run_is_refused_by_its_name(new_run):
    new_run().train()
    with pytest.raises(ConfigError, match=r"(?s)optimizer\.beta1.*0\.9.*0\.8") as raised:
        new_run(optimizer={"lr": 3e-3, "beta1": 0.8}, trainer={"total_steps": 4}, resume="auto").train()
    assert "resume=PATH" in raised.value.fix
    assert len(lines(output(new_run) / "metrics.jsonl")) == 2


def test_a_new_run_starts_from_a_checkpoint_with_another_task(new_run, tmp_path):
    new_run().train()
    trainer = {"total_steps": 4, "output_dir": str(tmp_path / "branch")}
    path = str(output(new_run))
    run = new_run(trainer=trainer, optimizer={"lr": 1e-2}, resume=path)
    run.train()
    assert [record["step"] for record in lines(tmp_path / "branch" / "metrics.jsonl")] == [3, 4]
    assert len(lines(output(new_run) / "metrics.jsonl")) == 2
    # It is a run of its own, which auto continues; before it has a checkpoint, from where it started.
    for checkpoint in (tmp_path / "branch" / "checkpoints").iterdir():
        (checkpoint / "manifest.json").unlink()
    (tmp_path / "branch" / "run.json").write_text(
        json.dumps(json.loads((tmp_path / "branch" / "run.json").read_text()) | {"finished_step": None})
    )
    before = comparable(tmp_path / "branch")
    new_run(trainer=trainer, optimizer={"lr": 1e-2}, resume="auto").train()
    assert comparable(tmp_path / "branch") == before
    with pytest.raises(ConfigError, match=r"(?s)another model.*trainer\.seed"):
        new_run(trainer={**trainer, "output_dir": str(tmp_path / "c"), "seed": 5}, resume=path).train()
    with pytest.raises(ConfigError, match="No steps are left to train"):
        new_run(trainer={"total_steps": 2, "output_dir": str(tmp_path / "d")}, resume=path).train()


def test_a_new_run_goes_on_with_the_kl_coefficient_that_has_adapted(new_run, tmp_path):
    algorithm = {"kl_coefficient": 0.1, "kl_target": 1e-6, "kl_horizon": 10.0}
    new_run(algorithm=algorithm).train()
    path = str(output(new_run))
    found = {}
    for name, changed in {"same": {}, "other": {"kl_horizon": 20.0}}.items():
        trainer = {"total_steps": 3, "output_dir": str(tmp_path / name)}
        new_run(trainer=trainer, algorithm={**algorithm, **changed}, resume=path).train()
        found[name] = lines(tmp_path / name / "metrics.jsonl")[0]["kl/coefficient"]
    new_run(trainer={"total_steps": 3, "output_dir": path}, algorithm=algorithm, resume="auto").train()
    assert found == {"same": lines(output(new_run) / "metrics.jsonl")[2]["kl/coefficient"], "other": 0.1}
    assert found["same"] != 0.1


def test_the_past_of_a_run_is_not_continued_over_its_later_checkpoints(new_run):
    new_run(checkpoint=EVERY_STEP).train()
    assert steps(output(new_run)) == [1, 2]
    trainer = {"total_steps": 4, "output_dir": str(output(new_run))}
    with pytest.raises(CheckpointError, match=r"(?s)later checkpoints of the same run.*step-000002"):
        new_run(trainer=trainer, resume=str(output(new_run) / "checkpoints" / "step-000001")).train()
    new_run(trainer=trainer, resume=str(output(new_run) / "checkpoints" / "step-000002")).train()
    assert [record["step"] for record in lines(output(new_run) / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_damaged_checkpoint_is_not_used_and_the_one_before_it_is(new_run, undisturbed):
    whole = undisturbed(4)
    trainer = {"total_steps": 3, "output_dir": str(output(new_run))}
    new_run(trainer=trainer, checkpoint=EVERY_STEP).train()
    state = output(new_run) / "checkpoints" / "step-000003" / "training" / "state.pt"
    state.write_bytes(state.read_bytes()[:-1])
    run = new_run(trainer={**trainer, "total_steps": 4}, resume="auto")
    run.train()
    assert any("not used" in note and "state.pt has" in note for note in run.progress.notes)
    assert_equal(output(new_run), whole)
    with pytest.raises(CheckpointError, match=r"state\.pt"):
        new_run(trainer={"output_dir": "/nowhere"}, resume=str(state.parents[2] / "unusable-step-000003")).train()


def change_prompts(state):
    state["sampler"][0]["prompts"] = 63


def change_tokens(state):
    state["sampler"][0]["digest"] = "0" * 32


def add_source(state):
    state["sampler"] *= 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_prompts, "there were 63 prompts and now there are 64"),
        (change_tokens, r"prompts of task\.py:prompts have other tokens"),
        (add_source, "there were 64, 64 prompts and now there are 64"),
    ],
)
def test_other_prompts_at_the_same_place_are_refused(new_run, monkeypatch, change, message):
    new_run(trainer={"total_steps": 1, "output_dir": str(output(new_run))}).train()
    driver = output(new_run) / "checkpoints" / "step-000001"
    state = json.loads((driver / "driver.json").read_text())
    change(state)
    monkeypatch.setattr("anytron.record.checkpoint.directory.Checkpoint.verify", lambda checkpoint: None)
    (driver / "driver.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match=f"(?s)prompts have changed.*{message}"):
        new_run(resume="auto").train()


CHANGED = {
    "algorithm.dynamic_sampling": True,
    "algorithm.dynamic_sampling_rounds": 3,
    "algorithm.importance_correction": "measured",
    "algorithm.kl_coefficient": 0.0,
    "algorithm.max_steps_without_signal": 3,
    "algorithm.overlong_masking": True,
    "critic.optimizer.lr": 1e-4,
    "critic.optimizer.warmup_steps": 9,
    "optimizer.lr": 1e-4,
    "optimizer.warmup_steps": 9,
    "rewards.*.weight": 0.5,
    "rollout.max_new_tokens": 5,
    "rollout.min_new_tokens": 2,
    "rollout.samples_per_prompt": 6,
    "rollout.stop": ["9"],
}
"""Each remedy with a value that is not the run's."""


def test_a_run_goes_on_with_every_remedy(new_run):
    assert CHANGED.keys() == REMEDIES.keys()

    def sections(section):
        return {key.split(".")[1]: CHANGED[key] for key in CHANGED if key.startswith(f"{section}.")}

    new_run(trainer={"total_steps": 1}, algorithm={"kl_coefficient": 0.1}).train()
    run = new_run(
        algorithm=sections("algorithm"),
        optimizer=sections("optimizer"),
        rewards=[{"function": "task.py:reward", "weight": 0.5}],
        rollout={**sections("rollout"), "weights": "file"},
        resume="auto",
    )
    assert run.train().steps == 2
    recorded = json.loads((output(new_run) / "run.json").read_text())["resumes"][0]["changes"]
    assert {one["key"].replace(".0.", ".*.") for one in recorded} >= {key for key in CHANGED if key[:6] != "critic"}


def test_a_critic_goes_on_with_its_remedies(new_run):
    ppo = {"algorithm": {"advantage": "gae"}, "checkpoint": EVERY_STEP}
    new_run(trainer={"total_steps": 1}, critic={}, **ppo).train()
    optimizer = {key.rpartition(".")[2]: value for key, value in CHANGED.items() if key.startswith("critic.")}
    assert new_run(critic={"optimizer": optimizer}, resume="auto", **ppo).train().steps == 2


def test_other_prompts_because_of_a_remedy_are_drawn_from_the_beginning(new_run, monkeypatch):
    """Also if an earlier continuation with it has saved nothing: then nothing has changed since the last start."""
    new_run(trainer={"total_steps": 1}).train()
    driver = output(new_run) / "checkpoints" / "step-000001"
    state = json.loads((driver / "driver.json").read_text())
    change_prompts(state)
    monkeypatch.setattr("anytron.record.checkpoint.directory.Checkpoint.verify", lambda checkpoint: None)
    (driver / "driver.json").write_text(json.dumps(state))
    longer = {"samples_per_prompt": 8, "max_new_tokens": 4}
    killed = new_run(resume="auto", rollout=longer)
    raise_at(killed, 1, method="poll")
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    again = new_run(resume="auto", rollout=longer)
    assert again.train().steps == 2
    assert "prompts are drawn from the beginning" in again.progress.notes


def test_a_checkpoint_from_before_there_were_mixes_is_continued(new_run, undisturbed, monkeypatch):
    whole = undisturbed(2)
    new_run(trainer={"total_steps": 1, "output_dir": str(output(new_run))}).train()
    driver = output(new_run) / "checkpoints" / "step-000001" / "driver.json"
    state = json.loads(driver.read_text())
    (state["sampler"],) = state["sampler"]
    del state["sampler"]["digest"]
    driver.write_text(json.dumps(state))
    monkeypatch.setattr("anytron.record.checkpoint.directory.Checkpoint.verify", lambda checkpoint: None)
    new_run(trainer={"total_steps": 2, "output_dir": str(output(new_run))}, resume="auto").train()
    assert_equal(output(new_run), whole)


def test_an_error_before_the_updates_loses_no_step(new_run, undisturbed):
    whole = undisturbed(4)
    trainer = {"total_steps": 4, "output_dir": str(output(new_run))}
    failing = new_run(trainer=trainer)
    raise_at(failing, 3, WorkerError("lost"), method="poll")
    with pytest.raises(WorkerError, match="lost"):
        failing.train()
    assert steps(output(new_run)) == [2]
    assert "holds everything trained before" in failing.progress.notes[-1]
    new_run(trainer=trainer, resume="auto").train()
    assert_equal(output(new_run), whole)


def test_an_error_in_the_updates_saves_nothing_half_trained(new_run):
    failing = new_run(trainer={"total_steps": 4, "output_dir": str(output(new_run))})
    raise_at(failing, 3, WorkerError("lost"))
    with pytest.raises(WorkerError, match="lost"):
        failing.train()
    assert steps(output(new_run)) == []


def test_what_an_interrupted_save_left_is_swept(new_run):
    trainer = {"total_steps": 3, "output_dir": str(output(new_run))}
    killed = new_run(trainer=trainer, checkpoint={**EVERY_STEP, "async": False})
    raise_at(killed, 2, method="written_files")
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    assert (output(new_run) / "checkpoints" / "step-000002").is_dir()
    again = new_run(trainer=trainer, resume="auto")
    again.train()
    assert any("interrupted" in note and "step-000002" in note for note in again.progress.notes)
    assert steps(output(new_run)) == [1, 3]


def test_without_room_training_goes_on_and_the_model_is_saved_first(new_run, monkeypatch):
    new_run(trainer={"total_steps": 1, "output_dir": str(output(new_run))}).train()
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    run = new_run(resume="auto")
    with pytest.raises(ResourceError, match=r"(?s)no room for the checkpoint of step 2.*resume=auto"):
        run.train()
    assert [record["step"] for record in lines(output(new_run) / "metrics.jsonl")] == [1, 2]
    assert load_file(output(new_run) / "hf" / "model.safetensors")
    assert steps(output(new_run)) == [1]


def test_a_model_that_could_not_be_saved_is_saved_by_resuming(new_run, undisturbed):
    whole = undisturbed(2)
    full = new_run()
    raise_at(full, 1, OSError(28, "No space left on device"), method="save_hf")
    with pytest.raises(OSError, match="No space left"):
        full.train()
    assert not (output(new_run) / "hf").exists()
    assert steps(output(new_run)) == [2]
    run = new_run(resume="auto")
    assert run.train().steps == 2
    assert run.progress.steps == []
    assert_equal(output(new_run), whole)
    assert not (output(new_run) / ".hf.part").exists()


def test_none_are_kept_if_none_are_wanted(new_run):
    new_run(checkpoint={"keep": 0, "every_steps": 1}).train()
    assert not (output(new_run) / "checkpoints").exists()
    with pytest.raises(CheckpointError, match="has no checkpoint from which"):
        new_run(trainer={"total_steps": 3, "output_dir": str(output(new_run))}, resume="auto").train()
    assert new_run(resume="auto").train().steps == 2


def test_minutes_are_counted_by_a_clock_that_nobody_sets(new_run, monkeypatch):
    monkeypatch.setattr(time, "time", iter(range(0, 10**9, 10**5)).__next__)  # jumps by a day at every look
    calls = raise_at(run := new_run(), 9)
    run.train()
    assert calls.count("save_checkpoint") == 1  # the last step's: half an hour has not passed
    now = iter(range(0, 10**6, 1801))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    calls = raise_at(run := new_run(trainer={"total_steps": 3, "output_dir": str(output(new_run))}, resume="auto"), 9)
    run.train()
    assert calls.count("save_checkpoint") == 1


def test_a_run_may_be_continued_in_the_same_process(new_run, undisturbed):
    """What a supervisor of restarts does."""
    trainer = {"total_steps": 4, "output_dir": str(output(new_run))}
    whole = undisturbed(4)
    for attempt, resume in enumerate(["never", "auto", "auto"]):
        run = new_run(trainer=trainer, checkpoint={**EVERY_STEP, "async": False}, resume=resume)
        if attempt < 2:
            raise_at(run, 2, WorkerError("lost"))
            with pytest.raises(WorkerError):
                run.train()
        else:
            run.train()
    assert_equal(output(new_run), whole)
