"""Steps ahead: responses of older weights, told as such, corrected for, and exact after a resume."""

from __future__ import annotations

import signal

import pytest
from pydantic import ValidationError

from tests.core.run.trainer.disturbed_runs import assert_equal, comparable, lines, output, raise_at, steps
from tests.core.run.trainer.test_restarts import lose
from tests.core.run.trainer.test_signals import send_in

AHEAD = {"max_staleness": 1}
FURTHER = {"max_staleness": 2, "continue_over_updates": True}
EVERY_SECOND = {"every_steps": 2, "async": False}
MISMATCH = {"rollout/importance_mean", "rollout/importance_clip_fraction", "rollout/kl"}


@pytest.fixture
def ahead(new_run, tmp_path):
    """A run of four steps with responses one step old: its metrics and its samples."""
    path = tmp_path / "ahead"
    new_run(rollout=AHEAD, trainer={"total_steps": 4, "output_dir": str(path), "log_samples": 64}).train()
    return comparable(path), lines(path / "samples.jsonl")


def ages(metrics):
    return [(record["rollout/age_mean"], record["rollout/age_max"]) for record in metrics]


def test_the_first_step_is_fresh_and_all_others_are_one_step_old(ahead):
    metrics, _ = ahead
    assert ages(metrics) == [(0, 0), (1, 1), (1, 1), (1, 1)]
    differences = [record["rollout/log_prob_abs_diff"] for record in metrics]
    assert differences[0] < 1e-5
    assert min(differences[1:]) > 1e-4
    assert all(record.keys() >= MISMATCH for record in metrics)
    assert metrics[0]["rollout/importance_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics[0]["rollout/kl"] == pytest.approx(0.0, abs=1e-6)
    assert min(record["rollout/kl"] for record in metrics[1:]) > 1e-6


def test_the_prompts_are_those_of_a_run_without(new_run, tmp_path, ahead):
    path = tmp_path / "fresh"
    new_run(trainer={"total_steps": 4, "output_dir": str(path), "log_samples": 64}).train()
    fresh = lines(path / "samples.jsonl")
    prompts = [(record["step"], record["prompt_id"]) for record in fresh]
    assert [(record["step"], record["prompt_id"]) for record in ahead[1]] == prompts
    assert ahead[1][:64] == fresh[:64], "before the first update nothing differs"
    assert ahead[1][128:192] != fresh[128:192]
    assert not (MISMATCH | {"rollout/age_mean"}) & comparable(path)[0].keys()


def test_a_run_that_is_resumed_at_a_planned_checkpoint_ends_as_one_that_was_not_disturbed(new_run, undisturbed):
    expected = undisturbed(5, rollout=AHEAD, checkpoint=EVERY_SECOND)
    assert [age for age, _ in ages(expected[0])] == [0, 1, 0, 1, 0], "nothing is under way at a checkpoint"

    trainer = {"total_steps": 5, "output_dir": str(output(new_run))}
    run = new_run(rollout=AHEAD, trainer=trainer, checkpoint=EVERY_SECOND)
    raise_at(run, 4)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert steps(output(new_run)) == [2]
    run = new_run(rollout=AHEAD, trainer=trainer, checkpoint=EVERY_SECOND, resume="auto")
    lose(run, {"update": {3}})  # step 5: all processes start again, at step 4
    run.train()
    assert_equal(output(new_run), expected)


def test_after_any_other_stop_the_same_prompts_get_fresh_responses_first(new_run, ahead):
    trainer = {"total_steps": 4, "output_dir": str(output(new_run)), "log_samples": 64}
    run = new_run(rollout=AHEAD, trainer=trainer)
    send_in(run, "rollout", "poll", 4, signal.SIGTERM)  # those of step 4, while step 3 is begun
    assert run.train().stopped_by == "SIGTERM"
    assert steps(output(new_run)) == [2]
    new_run(rollout=AHEAD, trainer=trainer, resume="auto").train()

    metrics, samples = comparable(output(new_run)), lines(output(new_run) / "samples.jsonl")
    prompts = [(record["step"], record["prompt_id"]) for record in ahead[1]]
    assert [(record["step"], record["prompt_id"]) for record in samples] == prompts
    assert metrics[:2] == ahead[0][:2]
    assert ages(metrics) == [(0, 0), (1, 1), (0, 0), (1, 1)]


def test_with_updates_in_between_steps_further_ahead_are_begun(new_run):
    run = new_run(rollout=FURTHER, trainer={"total_steps": 5})
    run.train()
    assert ages(run.progress.steps) == [(0, 0), (1, 1), (2, 2), (2, 2), (2, 2)]


def test_age_is_counted_in_updates_and_staleness_in_steps(new_run):
    run = new_run(rollout=AHEAD, trainer={"total_steps": 3}, algorithm={"mini_batches": 2})
    run.train()
    assert ages(run.progress.steps) == [(0, 0), (2, 2), (2, 2)]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rollout": AHEAD, "trainer": {"rollout_log_prob_tolerance": 1e-5}}, "remove one of the two keys"),
        ({"rollout": {"max_staleness": 2}}, "max_staleness=2 needs rollout.continue_over_updates=true"),
        ({"rollout": {"continue_over_updates": True}}, "needs rollout.max_staleness=1 or more"),
        ({"rollout": {"sleep": True, **AHEAD}}, "both work at the same time"),
        ({"rollout": AHEAD, "engine": {"offload": ["optimizer"]}}, "both work at the same time"),
    ],
    ids=["agreement", "two-steps", "no-step", "sleep", "offload"],
)
def test_what_cannot_be_is_refused_by_name(new_run, sections, message):
    with pytest.raises(ValidationError, match=message):
        new_run(**sections)


def test_the_correction_can_be_left_out_and_is_measured_all_the_same(new_run):
    runs = {}
    for correction in ("truncated", "measured", "none"):
        runs[correction] = new_run(
            rollout=AHEAD, algorithm={"importance_correction": correction}, trainer={"overwrite": True}
        )
        runs[correction].train()
    metrics = {correction: run.progress.steps[1] for correction, run in runs.items()}
    assert not MISMATCH & metrics["none"].keys()
    for name in MISMATCH:
        assert metrics["measured"][name] == pytest.approx(metrics["truncated"][name], rel=1e-2)
    assert metrics["measured"]["rollout/kl"] > 1e-6
    assert metrics["measured"]["loss/policy"] == metrics["none"]["loss/policy"]
    assert metrics["measured"]["loss/policy"] != metrics["truncated"]["loss/policy"]
