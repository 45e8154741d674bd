"""The loop, end to end, with engines that really train and really generate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from anytron.base.errors import ConfigError, DataError, EngineError
from anytron.run.preflight import rehearsal
from tests.core.run.trainer.disturbed_runs import comparable

SEVENS = """
def sevens(samples):
    return [sample.response_text.count("7") / 3 for sample in samples]
"""
ISSUE_KEYS = {
    "step",
    "reward/mean",
    "reward/std",
    "loss/policy",
    "loss/kl",
    "policy/entropy",
    "grad_norm",
    "response/length_mean",
    "rollout/log_prob_abs_diff",
    "time/step_s",
    "time/rollout_s",
    "time/update_s",
    "throughput/tokens_per_s",
}


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_policy_learns_what_it_is_rewarded_for(new_run):
    run = new_run(
        SEVENS, rewards=[{"function": "task.py:sevens"}], trainer={"total_steps": 40}, tracking={"plot": True}
    )
    summary = run.train()

    metrics = lines(summary.output_dir / "metrics.jsonl")
    assert [record["step"] for record in metrics] == list(range(1, 41))
    assert metrics[0]["reward/mean"] < 0.2
    assert metrics[-1]["reward/mean"] > 0.8
    assert metrics[-1]["policy/entropy"] < metrics[0]["policy/entropy"]
    # Rollout and training are two implementations of one model, at every step of the way.
    assert max(record["rollout/log_prob_abs_diff"] for record in metrics) < 1e-5
    assert metrics[0].keys() >= ISSUE_KEYS
    assert summary.metrics == metrics[-1]
    assert run.progress.total == 40
    assert run.progress.steps == metrics
    assert run.progress.finished
    assert run.progress.kernels == {"log_prob_kernel": "acme"}

    assert {path.name for path in summary.output_dir.iterdir()} == {
        ".lock", "run.json", "config.yaml", "patches.json", "metrics.jsonl", "samples.jsonl", "plots", "hf",
        "initial_model", "checkpoints", "logs",
    }  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(summary.output_dir / "hf", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(summary.output_dir / "hf")
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer("123>")["input_ids"]])).logits[0, -1]
    assert tokenizer.decode([int(logits.argmax())]) == "7"
    assert (summary.output_dir / "plots" / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_everything_but_the_times_follows_from_the_seed(new_run, tmp_path):
    def records(name, seed):
        run = new_run(trainer={"total_steps": 3, "seed": seed, "save_hf": False, "output_dir": str(tmp_path / name)})
        run.train()
        return [
            {key: value for key, value in record.items() if not key.startswith(("time/", "throughput/", "memory/"))}
            for record in lines(tmp_path / name / "metrics.jsonl")
        ]

    assert records("a", 1) == records("b", 1)
    assert records("c", 2) != records("d", 1)


def test_several_updates_per_step_compare_with_the_policy_before_the_first(new_run):
    run = new_run(algorithm={"epochs": 2, "mini_batches": 4, "kl_coefficient": 0.1}, optimizer={"lr": 1e-2})
    run.train()
    first, second = run.progress.steps
    # Within a step the policy leaves the one that sampled: ratios, clipping and KL show it ...
    assert first["policy/ratio_mean"] != pytest.approx(1.0, abs=1e-6)
    assert first["policy/clip_fraction"] > 0
    assert 0 < first["loss/kl"] < second["loss/kl"]
    # ... but rollout and *old* policy agree all the time.
    assert second["rollout/log_prob_abs_diff"] < 1e-5


def test_a_single_update_is_on_policy(new_run):
    run = new_run()
    run.train()
    for metrics in run.progress.steps:
        assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["policy/clip_fraction"] == 0
        assert metrics["loss/kl"] == 0


@pytest.mark.parametrize("max_tokens", [1, 40])
def test_micro_batches_do_not_change_the_update(new_run, tmp_path, max_tokens):
    def first_step(name, **engine):
        run = new_run(engine=engine, trainer={"total_steps": 1, "output_dir": str(tmp_path / name)})
        run.train()
        return run.progress.steps[0]

    whole, split = first_step("whole"), first_step("split", max_tokens_per_micro_batch=max_tokens)
    for key in ("grad_norm", "policy/entropy", "policy/ratio_mean", "rollout/log_prob_abs_diff"):
        assert split[key] == pytest.approx(whole[key], rel=1e-4, abs=1e-6)


def test_equal_rewards_give_no_gradient_and_no_nan(new_run):
    run = new_run("def same(samples):\n    return [0.3] * len(samples)\n", rewards=[{"function": "task.py:same"}])
    run.train()
    for metrics in run.progress.steps:
        assert metrics["reward/group_std_zero_fraction"] == 1
        assert metrics["loss/policy"] == 0
        assert metrics["grad_norm"] == 0


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean"])
def test_empty_responses_contribute_nothing(new_run, aggregation):
    run = new_run(algorithm={"aggregation": aggregation})
    run.executor.lose_every = 2
    run.train()
    for metrics in run.progress.steps:
        assert metrics["response/empty_fraction"] == 0.5
        assert metrics["rollout/log_prob_abs_diff"] < 1e-5
        assert 0 < metrics["grad_norm"] < 100


def test_tokens_that_the_tokenizer_does_not_have_are_counted(new_run, monkeypatch):
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.get_vocab", lambda _: {"0": 0, "1": 1, "9": 9})
    run = new_run(trainer={"total_steps": 2, "log_samples": 999})
    run.train()
    samples = lines(Path(run.config.trainer.output_dir) / "samples.jsonl")
    for metrics in run.progress.steps:
        drawn = [token for one in samples if one["step"] == metrics["step"] for token in one["response_tokens"]]
        assert 0 < metrics["response/unknown_tokens"] == sum(token not in (0, 1, 9) for token in drawn)


def test_only_empty_responses_are_an_error_that_says_so(new_run):
    run = new_run(algorithm={"max_steps_without_signal": 1})
    run.executor.lose_every = 1
    with pytest.raises(DataError, match="of 64 responses in the last step 64 were empty") as raised:
        run.train()
    assert "rollout.min_new_tokens=1" in raised.value.fix
    samples = lines(Path(run.config.trainer.output_dir) / "samples.jsonl")
    assert [record["response_tokens"] for record in samples] == [[]] * 4


PPO = {"algorithm": {"advantage": "gae"}, "critic": {"optimizer": {"lr": 3e-3}}}


@pytest.mark.slow
def test_a_critic_learns_what_to_expect_and_a_policy_what_it_is_rewarded_for(new_run):
    run = new_run(
        SEVENS,
        rewards=[{"function": "task.py:sevens"}],
        rollout={"samples_per_prompt": 1},
        data={"prompts_per_step": 64},
        trainer={"total_steps": 40},
        **PPO,
    )
    summary = run.train()

    first, last = run.progress.steps[0], run.progress.steps[-1]
    assert first["reward/mean"] < 0.2
    assert last["reward/mean"] > 0.8
    assert first["critic/value_mean"] == 0
    assert last["critic/value_mean"] == pytest.approx(last["critic/return_mean"], abs=0.2)
    critic = {"loss", "value_mean", "return_mean", "clip_fraction", "explained_variance", "grad_norm", "lr"}
    assert last.keys() >= ISSUE_KEYS | {f"critic/{name}" for name in critic}
    assert {path.name for path in (summary.output_dir / "critic").iterdir()} >= {"config.json", "tokenizer.json"}


def test_in_the_critics_warm_up_the_policy_stays(new_run):
    run = new_run(
        trainer={"total_steps": 3, "rollout_log_prob_tolerance": 1e-4},
        **{**PPO, "critic": {**PPO["critic"], "warmup_steps": 2}},
    )
    run.train()
    *warm_up, trained = run.progress.steps
    for metrics in warm_up:
        assert metrics["critic/grad_norm"] > 0
        assert "grad_norm" not in metrics
    assert trained["grad_norm"] > 0
    assert trained["critic/value_mean"] != 0


def test_a_failing_reward_loses_nothing_that_was_computed(new_run):
    code = """
calls = []

def moody(samples):
    calls.append(1)
    if len(calls) == 3:
        raise KeyError("no judge today")
    return [0.5 + index % 2 for index, _ in enumerate(samples)]
"""
    run = new_run(code, rewards=[{"function": "task.py:moody", "on_error": "stop"}], trainer={"total_steps": 5})
    with pytest.raises(DataError, match=r"(?s)reward moody.*no judge today"):
        run.train()
    directory = Path(run.config.trainer.output_dir)
    assert [record["step"] for record in lines(directory / "metrics.jsonl")] == [1, 2]
    third = [record for record in lines(directory / "samples.jsonl") if record["step"] == 3]
    assert len(third) == 64
    assert all(record["reward"] is None for record in third)


PICKY = """
def picky(samples):
    if any("7" in sample.response_text for sample in samples):
        raise LookupError("seven")
    return [sum(sample.response_tokens) / 30 for sample in samples]
"""


def test_samples_that_a_reward_fails_for_are_counted_and_written_and_not_learnt_from(new_run):
    run = new_run(PICKY, rewards=[{"function": "task.py:picky"}], algorithm={"mini_batches": 8}, rollout=SMALL)
    run.train()
    samples = lines(Path(run.config.trainer.output_dir) / "samples.jsonl")
    for metrics in run.progress.steps:
        assert 0 < metrics["reward/picky/failed"] < 32
        assert metrics["grad_norm"] > 0
        assert metrics["update/skipped"] == 0
    failed = [record for record in samples if "7" in record["response"]]
    assert all(record["reward"] is None and "seven" in record["reward_errors"]["picky"] for record in failed)
    assert len(failed) >= sum(min(16, metrics["reward/picky/failed"]) for metrics in run.progress.steps)
    assert all("reward_errors" not in record for record in samples if "7" not in record["response"])


SMALL = {"samples_per_prompt": 4}


@pytest.mark.parametrize(
    ("code", "sections", "error"),
    [
        (
            "def exits(samples):\n    exit()\n",
            {"rewards": [{"function": "task.py:exits"}]},
            "tried to end its process",
        ),
        (
            "def exits():\n    exit()\n",
            {"data": {"source": "task.py:exits", "options": {}}},
            "source of prompts tried to end its process",
        ),
        (
            "def exits():\n    exit()\n",
            {"model": {"tokenizer": "task.py:exits"}},
            "function tried to end its process",
        ),
    ],
    ids=["reward", "source", "tokenizer"],
)
def test_a_function_of_the_user_that_exits_ends_the_run_with_an_error(new_run, monkeypatch, code, sections, error):
    monkeypatch.setattr(rehearsal, "GIVE_UP_S", 0.0)  # or it is found by the rehearsal, if that has the time
    with pytest.raises((ConfigError, DataError), match=error):
        new_run(code, **sections).train()


def test_a_reward_that_exits_is_refused_if_the_rehearsal_has_the_time(new_run, monkeypatch):
    monkeypatch.setattr(rehearsal, "GIVE_UP_S", 600.0)
    run = new_run(
        "def exits(samples):\n    exit()\n",
        rewards=[{"function": "task.py:exits"}],
        data={"options": {"count": 2, "digits": 3}},
    )
    with pytest.raises(DataError, match=r"(?s)The reward exits fails for right answers.*all 2 prompts.*SystemExit"):
        run.train()


def test_engines_that_disagree_stop_the_run_after_saying_by_how_much(new_run):
    run = new_run(trainer={"rollout_log_prob_tolerance": 1e-30})
    with pytest.raises(EngineError, match="Rollout and training log-probs differ"):
        run.train()
    assert lines(Path(run.config.trainer.output_dir) / "metrics.jsonl")[0]["rollout/log_prob_abs_diff"] > 0


@pytest.mark.parametrize(
    ("sections", "error", "message"),
    [
        ({"data": {"options": {"count": 4, "digits": 40}}}, DataError, "Every prompt of a source was left out"),
        ({"data": {"options": {"count": 4, "digits": 29}}}, DataError, "more than 29 tokens"),
        ({"algorithm": {"advantage": "grop"}}, ConfigError, "did you mean grpo"),
        ({"algorithm": {"advantage": "gaee"}}, ConfigError, "did you mean gae"),
        ({"rewards": [{"function": "exact_mach"}]}, ConfigError, "did you mean exact_match"),
        ({"model": {"path": "nowhere", "config": None}}, ConfigError, "nowhere/config.json"),
    ],
)
def test_what_can_be_wrong_is_found_before_a_worker_starts(new_run, sections, error, message):
    run = new_run(**sections)
    with pytest.raises(error, match=message):
        run.train()
    assert run.executor.started == []
    assert not Path(run.config.trainer.output_dir).exists()


def test_an_earlier_run_is_not_overwritten_unasked(new_run):
    new_run().train()
    with pytest.raises(ConfigError, match="earlier run"):
        new_run().train()
    directory = new_run().config.trainer.output_dir
    (Path(directory) / "notes.txt").write_text("mine")
    again = new_run(trainer={"total_steps": 1, "output_dir": directory, "overwrite": True, "save_hf": False})
    again.train()
    assert len(lines(Path(directory) / "metrics.jsonl")) == 1
    assert not (Path(directory) / "hf").exists()
    assert (Path(directory) / "notes.txt").read_text() == "mine"


def test_two_replicas_give_the_samples_of_one(new_run, tmp_path):
    """Half of the rows each, so batches of another shape: log-probs agree to rounding, tokens exactly."""
    samples, metrics = [], []
    for replicas in (1, 2):
        output = tmp_path / f"replicas-{replicas}"
        trainer = {"total_steps": 2, "output_dir": str(output), "log_samples": 64}
        run = new_run(rollout={"replicas": replicas}, trainer=trainer)
        run.train()
        assert run.executor.started == ["trainer"] + ["rollout"] * replicas
        samples.append(lines(output / "samples.jsonl"))
        metrics.append(comparable(output))
    assert len(samples[0]) == 2 * 64
    assert samples[0] == samples[1]
    assert metrics[0] == [pytest.approx(record, rel=1e-3, abs=1e-5) for record in metrics[1]]
