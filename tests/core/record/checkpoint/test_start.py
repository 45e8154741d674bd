"""Where a run begins: what is refused, and remedies that lead on."""

import pytest

from anytron.base.errors import CheckpointError, ConfigError
from anytron.config.schema import RunConfig
from anytron.record.checkpoint.directory import CheckpointDirectory
from anytron.record.checkpoint.manifest import DriverState
from anytron.record.checkpoint.resume import choose_start
from anytron.record.tracking.claim import ClaimedDirectory
from anytron.record.tracking.record import RunRecord

DATA = {"source": "jsonl", "options": {"path": "p.jsonl"}}


def configured(directory, **sections):
    values = {
        "model": {"path": "/m"},
        "data": DATA,
        "rewards": [{"function": "exact_match"}],
        "trainer": {"output_dir": str(directory), "total_steps": 9},
    }
    return RunConfig.model_validate({**values, **sections})


def start(config):
    with ClaimedDirectory(config, lambda line: None) as claimed:
        return choose_start(config, claimed, lambda line: None)


@pytest.fixture
def run(tmp_path):
    """Make the directory of a run with the checkpoints of two steps; return the function that configures the run."""

    def make(elsewhere):
        places = {"checkpoint": {"path": str(tmp_path / "saved")}} if elsewhere else {}

        def config(directory="run", **sections):
            return configured(tmp_path / directory, **{**places, **sections})

        output = tmp_path / "run"
        output.mkdir()
        values = config().model_dump(mode="json")
        RunRecord(config=values).write(output)
        (output / "metrics.jsonl").write_text("{}\n")
        checkpoints = CheckpointDirectory.of(config())
        for step in (1, 2):
            checkpoints.begin(step)
            checkpoints.commit(DriverState(step=step, sampler=(), weights_version=step, config=values), {})
        return config

    return make


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_change_that_a_checkpoint_accepts_may_begin_a_new_run_as_the_remedy_says(run, tmp_path, elsewhere):
    config = run(elsewhere)
    changed = {"data": {**DATA, "prompts_per_step": 4}}
    with pytest.raises(ConfigError, match="differs from the one of the run") as caught:
        start(config(resume="auto", **changed))
    assert "resume=PATH" in caught.value.fix
    assert ("checkpoint.path" in caught.value.fix) is elsewhere
    others = {"checkpoint": {"path": str(tmp_path / "other")}} if elsewhere else {}
    begun = start(config("new", resume=str(CheckpointDirectory.of(config()).path), **changed, **others))
    assert (begun.step, begun.in_place) == (2, False)


def test_a_change_of_the_model_may_not_begin_at_a_checkpoint_and_the_remedy_does_not_say_so(run, tmp_path):
    config = run(False)
    changed = {"trainer": {"output_dir": str(tmp_path / "run"), "total_steps": 9, "seed": 5}}
    with pytest.raises(ConfigError, match="differs from the one of the run") as caught:
        start(config(resume="auto", **changed))
    assert "resume=never" in caught.value.fix
    assert "PATH" not in caught.value.fix
    assert start(config("new", resume="never")).step == 0


def test_a_new_run_does_not_write_into_the_checkpoints_of_the_run_that_it_begins_with(run, tmp_path):
    config = run(True)
    path = str(tmp_path / "saved" / "step-000002")
    with pytest.raises(ConfigError, match="checkpoints of an earlier run") as caught:
        start(config("new", resume=path))
    assert caught.value.fix == "set checkpoint.path to a different directory"
    assert start(config("new", resume=path, checkpoint={"path": str(tmp_path / "other")})).step == 2


def test_an_earlier_checkpoint_begins_a_new_run_as_the_remedy_says(run, tmp_path):
    config = run(True)
    path = str(tmp_path / "saved" / "step-000001")
    with pytest.raises(CheckpointError, match="would delete later checkpoints") as caught:
        start(config(resume=path))
    assert "trainer.output_dir and checkpoint.path to different directories" in caught.value.fix
    assert start(config("new", resume=path, checkpoint={"path": str(tmp_path / "other")})).step == 1
