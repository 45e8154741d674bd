"""Dynamic sampling in whole runs: what is drawn, what is trained on, and that a run that is killed draws the same."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from pydantic import ValidationError

from anytron.base.errors import DataError
from anytron.config.load import load_config
from anytron.run.preflight.prepare import prepare
from tests.core.run.trainer.disturbed_runs import assert_equal, comparable, lines, output, raise_at, steps
from tests.core.run.trainer.test_signals import send_in
from tests.core.run.trainer.torch_engines import TorchEngine
from tests.core.run.trainer.validations import found, section

SAMPLES = 4
ALL = 10**6
SAMPLING = {"algorithm": {"dynamic_sampling": True}, "rollout": {"samples_per_prompt": SAMPLES}}
"""The policy is random: of groups of four, about half have no digit in its place, and no signal."""


@pytest.fixture
def trained(monkeypatch):
    """The sequences of each update, as it gets them."""
    updates = []
    update = TorchEngine.update

    def recording(engine, micro_batches, loss):
        updates.append([tuple(row) for batch in micro_batches for row in sequences(batch)])
        return update(engine, micro_batches, loss)

    monkeypatch.setattr(TorchEngine, "update", recording)
    return updates


def sequences(batch):
    return [row.tolist() for row in batch.tokens.split(batch.lengths.tolist())]


def naive(config, records, rounds):
    """Draw prompt by prompt, in plain loops; give the sequences and the numbers of each step.

    Args:
        config: The run.
        records: All samples of the run, in the order in which they were drawn.
        rounds: At most.
    """
    prepared, records = prepare(config), iter(records)
    for step in range(1, config.trainer.total_steps + 1):
        kept, drawn, made = [], 0, 0
        while len(kept) < config.data.prompts_per_step and made < rounds:
            made += 1
            for _ in range(config.data.prompts_per_step - len(kept)):
                (prompt,) = prepared.draw(1)
                drawn += 1
                group = [next(records) for _ in range(SAMPLES)]
                assert [(one["step"], one["prompt_id"]) for one in group] == [(step, prompt.id)] * SAMPLES
                best, worst = max(one["reward"] for one in group), min(one["reward"] for one in group)
                if best > worst:
                    kept.append([(*prompt.tokens, *one["response_tokens"]) for one in group])
        yield (
            [sequence for group in kept for sequence in group],
            {
                "sampling/rounds": made,
                "sampling/groups_drawn": drawn,
                "sampling/groups_dropped": drawn - len(kept),
                "sampling/groups_missing": config.data.prompts_per_step - len(kept),
                "sampling/no_signal_fraction": pytest.approx((drawn - len(kept)) / drawn),
            },
        )
    assert list(records) == []


def check_against_the_naive_loop(run, trained, rounds=10):
    run.train()
    path = Path(run.config.trainer.output_dir)
    expected = list(naive(load_config(path / "config.yaml"), lines(path / "samples.jsonl"), rounds))
    assert [sorted(update) for update in trained] == [sorted(wanted) for wanted, _ in expected]
    for metrics, (_, numbers) in zip(run.progress.steps, expected, strict=True):
        assert {name: metrics[name] for name in numbers} == numbers
    return [numbers for _, numbers in expected]


@pytest.mark.parametrize("rounds", [1, 2, 10])
def test_groups_with_signal_are_trained_on_and_others_drawn_again(new_run, trained, rounds):
    algorithm = {"dynamic_sampling": True, "dynamic_sampling_rounds": rounds}
    run = new_run(**{**SAMPLING, "algorithm": algorithm}, trainer={"total_steps": 3, "log_samples": ALL})
    numbers = check_against_the_naive_loop(run, trained, rounds)
    assert all(step["sampling/groups_dropped"] > 0 for step in numbers)
    assert (max(step["sampling/groups_missing"] for step in numbers) == 0) == (rounds == 10)
    assert 2 < max(step["sampling/rounds"] for step in numbers) < 10 or rounds < 10


@pytest.mark.parametrize(
    ("target", "sabotage"),
    [
        ("anytron.run.trainer.experience.have_signal", lambda rewards, groups: rewards.isfinite()),
        ("anytron.run.trainer.experience.have_signal", lambda rewards, groups: rewards > 0),
        (
            "anytron.run.preflight.prepare.PreparedRun.draw",
            lambda prepared, count: prepared.sampler.draw(count + 1)[:count],
        ),
    ],
    ids=["all-are-kept", "samples-not-groups", "a-prompt-is-lost"],
)
def test_a_loop_that_keeps_or_draws_something_else_is_noticed(new_run, trained, monkeypatch, target, sabotage):
    run = new_run(**SAMPLING, trainer={"total_steps": 2, "log_samples": ALL})
    with monkeypatch.context() as broken:
        broken.setattr(target, sabotage)
        run.train()
    monkeypatch.setattr(run, "train", lambda: None)
    with pytest.raises((AssertionError, StopIteration, RuntimeError)):
        check_against_the_naive_loop(run, trained)


def test_rewards_and_lengths_are_of_all_samples_that_were_drawn(new_run):
    run = new_run(**SAMPLING, trainer={"total_steps": 1, "log_samples": ALL})
    run.train()
    (metrics,) = run.progress.steps
    records = lines(output(new_run) / "samples.jsonl")
    assert len(records) == SAMPLES * metrics["sampling/groups_drawn"] > SAMPLES * 8
    assert metrics["reward/mean"] == pytest.approx(sum(one["reward"] for one in records) / len(records))
    assert metrics["reward/group_std_zero_fraction"] == pytest.approx(metrics["sampling/no_signal_fraction"])
    lengths = [len(one["response_tokens"]) for one in records]
    assert metrics["response/length_mean"] == pytest.approx(sum(lengths) / len(lengths))


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({}, id="in-turns", marks=pytest.mark.slow),
        pytest.param({"rollout": {"samples_per_prompt": SAMPLES, "max_staleness": 1}}, id="one-step-ahead"),
    ],
)
@pytest.mark.parametrize("poll", [7, pytest.param(6, marks=pytest.mark.slow), pytest.param(9, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_in_the_middle_of_its_rounds_goes_on_to_the_digit(new_run, undisturbed, sections, poll):
    sections = {**SAMPLING, **sections, "checkpoint": {"every_steps": 2, "async": False}}
    whole = undisturbed(4, **sections)
    assert sum(line["sampling/rounds"] for line in whole[0][:3]) >= 7, "or nothing is killed between two rounds"
    trainer = {"total_steps": 4, "output_dir": str(output(new_run))}
    killed = new_run(trainer=trainer, **sections)
    raise_at(killed, poll, method="poll")
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    assert steps(output(new_run)) in ([], [2])
    new_run(trainer=trainer, resume="auto", **sections).train()
    assert_equal(output(new_run), whole)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_stop_by_a_signal_loses_and_repeats_no_prompt(new_run, staleness):
    sections = {**SAMPLING, "rollout": {"samples_per_prompt": SAMPLES, "max_staleness": staleness}}
    trainer = {"total_steps": 4, "output_dir": str(output(new_run)), "log_samples": ALL}
    run = new_run(trainer=trainer, **sections)
    send_in(run, "rollout", "poll", 8, signal.SIGTERM)
    assert run.train().stopped_by == "SIGTERM"
    (saved,) = steps(output(new_run))
    assert 0 < saved < 4
    new_run(trainer=trainer, resume="auto", **sections).train()
    records = lines(output(new_run) / "samples.jsonl")
    prompts = [one["prompt_id"] for one in records[::SAMPLES]]
    drawn = prepare(load_config(output(new_run) / "config.yaml")).draw(len(prompts))
    assert prompts == [one.id for one in drawn]


def test_rounds_after_the_first_have_the_newest_weights(new_run):
    run = new_run(
        **{**SAMPLING, "rollout": {"samples_per_prompt": SAMPLES, "max_staleness": 1}}, trainer={"total_steps": 3}
    )
    run.train()
    for metrics in run.progress.steps[1:]:
        assert metrics["sampling/rounds"] > 1
        assert metrics["rollout/age_max"] == 1
        assert 0 < metrics["rollout/age_mean"] < 1


def test_two_replicas_draw_and_keep_what_one_does(new_run, tmp_path):
    made = []
    for replicas in (1, 2):
        path = tmp_path / f"replicas-{replicas}"
        rollout = {"samples_per_prompt": SAMPLES, "replicas": replicas}
        new_run(**{**SAMPLING, "rollout": rollout}, trainer={"output_dir": str(path), "log_samples": ALL}).train()
        made.append((lines(path / "samples.jsonl"), comparable(path)))
    assert made[0][0] == made[1][0]
    assert made[0][1] == [pytest.approx(record, rel=1e-3, abs=1e-5) for record in made[1][1]]


SELDOM = """
def seldom(samples):
    return [float(sample.prompt_text[0] in "12" and index % 2) for index, sample in enumerate(samples)]
"""
BOUND = {"rewards": [{"function": "task.py:seldom"}], "rollout": {"samples_per_prompt": SAMPLES}}


def test_with_the_last_round_a_step_has_what_there_is_and_says_so(new_run, trained):
    algorithm = {"dynamic_sampling": True, "dynamic_sampling_rounds": 2, "mini_batches": 8}
    run = new_run(SELDOM, **BOUND, algorithm=algorithm, trainer={"total_steps": 3})
    run.train()
    for metrics in run.progress.steps:
        assert metrics["sampling/rounds"] == 2
        assert 0 < metrics["sampling/groups_missing"] < 8
        assert metrics["grad_norm"] > 0
    groups = [8 - int(metrics["sampling/groups_missing"]) for metrics in run.progress.steps]
    assert [len(update) for update in trained] == [SAMPLES] * sum(groups), "a mini-batch is one group, or is left out"
    first, last = run.progress.warnings
    missing = int(run.progress.steps[0]["sampling/groups_missing"])
    assert first.startswith(
        f"step 1: sampling/groups_missing is {missing}: the step has fewer groups than data.prompts"
    )
    assert first.endswith("or raise algorithm.dynamic_sampling_rounds")
    assert last.startswith("sampling/groups_missing was above 0 in 3 of 3 steps.")


LEARNT = """
calls = []

def learnt(samples):
    calls.append(1)
    return [float(len(calls) > 2 or index % 2) for index, _ in enumerate(samples)]
"""


def test_where_no_group_has_signal_the_run_ends_with_its_reason_and_its_last_state(new_run):
    algorithm = {"dynamic_sampling": True, "dynamic_sampling_rounds": 1, "max_steps_without_signal": 1}
    run = new_run(
        LEARNT,
        algorithm=algorithm,
        rewards=[{"function": "task.py:learnt"}],
        rollout={"samples_per_prompt": SAMPLES},
        trainer={"total_steps": 5, "log_samples": ALL},
    )
    with pytest.raises(DataError, match="There is nothing to train on") as raised:
        run.train()
    assert raised.value.why.endswith(
        "of 32 responses in the last step none failed; within each group, rewards are equal (over all groups, 1 to 1)"
    )
    assert "the task is learnt" in raised.value.fix
    assert steps(output(new_run)) == [2]
    assert len([one for one in lines(output(new_run) / "samples.jsonl") if one["step"] == 3]) == 32


HOPELESS_PROMPTS = """
def picky(samples):
    if any(sample.prompt_text[0] in "0123456" for sample in samples):
        raise LookupError("no judge")
    return reward(samples)
"""


def test_a_reward_that_fails_for_all_of_a_later_round_costs_that_round(new_run):
    """Rounds are small: with one or two prompts, each may be one that the function always fails for."""
    sections = {**SAMPLING, "rewards": [{"function": "task.py:picky"}]}
    run = new_run(HOPELESS_PROMPTS, **sections, trainer={"total_steps": 3, "log_samples": ALL})
    run.train()
    for metrics in run.progress.steps:
        assert metrics["reward/picky/failed"] >= metrics["sampling/groups_drawn"]
        assert metrics["grad_norm"] > 0
    records = lines(output(new_run) / "samples.jsonl")
    for one in records:
        assert (one["reward"] is None) == (one["prompt"][0] in "0123456") == ("reward_errors" in one)


@pytest.mark.slow
def test_validation_is_none_of_it(new_run, tmp_path):
    """Before training it finds the same; and training does the same whether it validates or not."""
    shaped = {"dynamic_sampling": True, "overlong_buffer": 2, "overlong_masking": True}
    paths = {name: tmp_path / name for name in ("plain", "shaped", "alone")}
    for name, path in paths.items():
        new_run(
            rollout={"samples_per_prompt": SAMPLES},
            trainer={"output_dir": str(path)},
            **({} if name == "alone" else {"validation": section()}),
            **({} if name == "plain" else {"algorithm": shaped}),
        ).train()
    assert found(paths["plain"])[0] == found(paths["shaped"])[0]
    assert comparable(paths["shaped"]) == comparable(paths["alone"])


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"algorithm": {"dynamic_sampling": True, "advantage": "reinforce_plus_plus"}}, "learns from them"),
        ({"algorithm": {"dynamic_sampling": True, "advantage": "gae"}, "critic": {}}, "learns from them"),
        ({"algorithm": {"overlong_buffer": 4}}, "overlong_buffer=4 is above rollout.max_new_tokens=3"),
        (
            {"algorithm": {"overlong_buffer": 2}, "environment": {"path": "task.py:Environment"}},
            "where rollout.max_new_tokens limits each turn",
        ),
    ],
    ids=["returns", "critic", "long-buffer", "environment"],
)
def test_what_cannot_be_meant_is_refused_by_name(new_run, sections, message):
    with pytest.raises(ValidationError, match=message):
        new_run(**sections)
