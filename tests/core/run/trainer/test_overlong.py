"""Overlong responses in whole runs: punished as by a reward function, and masked as if never drawn."""

from __future__ import annotations

import pytest

from tests.core.run.trainer.disturbed_runs import comparable, lines

BY_HAND = """
def finished_only(samples):
    own = reward(samples)
    return [value if sample.finished else LookupError("cut") for value, sample in zip(own, samples)]

def punished(samples):
    longest, cache, factor = 6, 4, 0.5
    values = []
    for value, sample in zip(reward(samples), samples):
        length = len(sample.response_tokens)
        excess = max(0, length - (longest - cache))
        values.append(value - factor * excess / cache)
    return values
"""
ROLLOUT = {"samples_per_prompt": 8, "max_new_tokens": 6}


def run_of(new_run, path, algorithm, function="reward", **sections):
    run = new_run(
        BY_HAND,
        algorithm=algorithm,
        rewards=[{"function": f"task.py:{function}"}],
        rollout=ROLLOUT,
        trainer={"total_steps": 3, "output_dir": str(path), "log_samples": 10**6},
        **sections,
    )
    run.train()
    return comparable(path), lines(path / "samples.jsonl")


def of_updates(metrics):
    return [{name: line[name] for name in ("loss/total", "grad_norm", "policy/entropy")} for line in metrics]


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ["grpo", "reinforce_plus_plus"])
@pytest.mark.parametrize("mini_batches", [1, 2])
def test_what_is_masked_teaches_as_little_as_what_a_reward_drops(new_run, tmp_path, advantage, mini_batches):
    algorithm = {"advantage": advantage, "mini_batches": mini_batches}
    masked, samples = run_of(new_run, tmp_path / "masked", {**algorithm, "overlong_masking": True})
    dropped, same = run_of(new_run, tmp_path / "dropped", algorithm, "finished_only")
    assert of_updates(masked) == of_updates(dropped)
    assert [one["response_tokens"] for one in samples] == [one["response_tokens"] for one in same]
    assert {one["finished"] for one in samples} == {True, False}
    first = [one for one in samples if one["step"] == 1]
    assert masked[0]["reward/mean"] == pytest.approx(sum(one["reward"] for one in first) / len(first))
    plain, _ = run_of(new_run, tmp_path / "plain", algorithm)
    assert plain[0]["grad_norm"] != masked[0]["grad_norm"]


def test_the_punishment_is_what_a_reward_function_would_take(new_run, tmp_path):
    algorithm = {"overlong_buffer": 4, "overlong_penalty": 0.5}
    shaped, samples = run_of(new_run, tmp_path / "shaped", algorithm)
    by_hand, _ = run_of(new_run, tmp_path / "by-hand", {}, "punished")
    for line, same in zip(of_updates(shaped), of_updates(by_hand), strict=True):
        assert line == pytest.approx(same, rel=1e-4, abs=1e-6)
    for line, same in zip(shaped, by_hand, strict=True):
        assert line["reward/mean"] + line["reward/overlong_penalty"] == pytest.approx(same["reward/mean"], abs=1e-6)
    first = [len(one["response_tokens"]) for one in samples if one["step"] == 1]
    penalty = sum(-0.5 * max(0, length - 2) / 4 for length in first) / len(first)
    assert shaped[0]["reward/overlong_penalty"] == pytest.approx(penalty)
    assert shaped[0]["reward/overlong_penalty"] < 0


def test_signal_is_looked_for_in_rewards_before_the_punishment(new_run, tmp_path):
    """Responses that are all wrong are not told apart by their lengths alone."""
    dynamic = {"dynamic_sampling": True, "dynamic_sampling_rounds": 1}
    plain, _ = run_of(new_run, tmp_path / "plain", dynamic)
    shaped, _ = run_of(new_run, tmp_path / "shaped", {**dynamic, "overlong_buffer": 4})
    assert plain[0]["sampling/groups_dropped"] == shaped[0]["sampling/groups_dropped"] > 0


def test_signal_is_looked_for_in_what_is_not_masked(new_run, tmp_path):
    algorithm = {"dynamic_sampling": True, "dynamic_sampling_rounds": 4, "overlong_masking": True}
    metrics, samples = run_of(new_run, tmp_path / "run", algorithm)
    first = [one for one in samples if one["step"] == 1]
    groups = [first[start : start + 8] for start in range(0, len(first), 8)]
    kept = [group for group in groups if len({one["reward"] for one in group if one["finished"]}) > 1]
    assert metrics[0]["sampling/groups_drawn"] == len(groups)
    assert metrics[0]["sampling/groups_dropped"] == len(groups) - len(kept)
    assert len(kept) < len([group for group in groups if len({one["reward"] for one in group}) > 1])
