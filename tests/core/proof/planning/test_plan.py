"""What a run takes of its devices: added up, compared with what is measured, and made smaller."""

from __future__ import annotations

import sys

import pytest

from anytron.base.errors import ConfigError
from anytron.config.load import load_config
from anytron.proof.planning import candidates, make_plan, remedies
from anytron.workers.engines.estimates import DeviceMemory
from benchmarks.harness import MODEL_OF_100M, run_measured
from tests.house import ROOT

GIB = 1 << 30
SORT = ROOT / "examples" / "grpo_sort.yaml"
QWEN3_8B = (
    "model.config=null",
    f"model.path={ROOT / 'examples' / 'models' / 'Qwen3-8B'}",
    "model.dtype=bfloat16",
    "rollout.max_new_tokens=2048",
    "rollout.max_batch_size=16",
)
LARGE = DeviceMemory(80 * GIB, accelerator=True)

MEASURED = {"sort": ((), 6.0), "100m": (MODEL_OF_100M, 18.0)}
"""Runs, and the mean length of their prompts."""


def plan_of(*overrides, device=LARGE, prompt_tokens=None):
    return make_plan(load_config(SORT, overrides), device, prompt_tokens)


def test_an_accelerator_has_one_rank_and_with_colocated_rollout_a_replica():
    (both,) = plan_of("parallel.data_parallel_size=2").devices
    assert both.crowd == "1 training rank and 1 rollout replica"
    training, rollout = plan_of("rollout.placement=separate").devices
    assert (training.crowd, rollout.crowd) == ("1 training rank", "1 rollout replica")
    assert both.needed > max(training.needed, rollout.needed) / 2
    assert all(part.name != "process" for device in (both, training, rollout) for part in device.shares[0].parts)


@pytest.mark.parametrize("device", [LARGE, DeviceMemory(None, accelerator=False)], ids=["accelerator", "processor"])
def test_every_rank_that_generates_by_itself_has_a_cache(device):
    sizes = ("parallel.data_parallel_size=2", "parallel.tensor_model_parallel_size=2", "rollout.engine=megatron")
    (found,) = plan_of(*sizes, device=device).devices
    ranks, *others = found.shares
    assert [share.who for share in others] == ([] if device.accelerator else ["driver"])
    assert ranks.count == (1 if device.accelerator else 4)
    # 512 sequences in halves, 4 tokens, keys and values of 2 layers x 2 heads x 16 in float32, in halves again
    (cache,) = [part.size for part in ranks.parts if part.name == "rollout-cache"]
    assert cache == 256 * 4 * (2 * 2 * 2 * 16) * 4 // 2
    always = sum(part.size for share in found.shares for part in share.parts * share.count if part.when == "always")
    generating = sum(part.size for share in found.shares for part in share.parts * share.count) - always
    assert found.needed <= always + generating
    without = plan_of(*sizes[:2], "rollout.engine=transformers", device=device).devices[0].shares[0]
    assert sum(part.size for part in ranks.parts) == sum(part.size for part in without.parts) + cache


def test_a_teacher_lies_beside_the_policy_until_it_is_offloaded():
    taught = (
        f"teacher.path={ROOT / 'examples' / 'models' / 'Qwen3-8B'}",
        "algorithm.distillation_coefficient=1.0",
        "model.dtype=bfloat16",
    )
    alone, beside = plan_of("model.dtype=bfloat16"), plan_of(*taught)
    assert beside.needed - alone.needed == 2 * 8_190_735_360, "Qwen3-8B has so many parameters"
    assert plan_of(*taught, "parallel.tensor_model_parallel_size=2").needed < 0.6 * beside.needed
    (offload,) = [one for one in candidates(load_config(SORT, taught)) if one.startswith("engine.offload")]
    assert offload == "engine.offload=[optimizer, gradients, teacher]"
    (part,) = [part for part in plan_of(*taught, offload).devices[0].shares[0].parts if part.name == "teacher"]
    assert (part.when, part.exact) == ("training", True)


def test_a_reward_model_lies_beside_the_fullest_training_rank_and_leaves_it_when_it_is_offloaded():
    judged = (
        f"reward_model.path={ROOT / 'examples' / 'models' / 'Qwen3-8B'}",
        "rewards=[{function: reward_model}]",
        "model.dtype=bfloat16",
    )
    (device,) = plan_of(*judged).devices
    assert device.crowd == "1 training rank, 1 reward model rank and 1 rollout replica"
    (part,) = [part for part in device.shares[1].parts if part.name == "reward-model"]
    numbers = 8_190_735_360 - 151_936 * 4096 + 4096  # Qwen3-8B with a head of one row in the place of its own
    assert (part.size, part.when, part.exact) == (2 * numbers, "always", True)
    split = plan_of(*judged, "reward_model.parallel.tensor_model_parallel_size=2").devices[0].shares[1].parts
    assert 0.5 <= split[0].size / part.size < 0.51
    assert "reward_model.offload=true" in candidates(load_config(SORT, judged))
    away = plan_of(*judged, "reward_model.offload=true").devices[0].shares[1].parts
    assert {part.when for part in away} == {"scoring"}
    machine = plan_of(*judged, "parallel.data_parallel_size=4", device=DeviceMemory(None, accelerator=False)).devices[0]
    assert machine.crowd.startswith("4 training ranks, 1 reward model rank")


def test_what_learns_from_given_answers_has_no_replica_and_micro_batches_of_its_examples():
    stages = ROOT / "examples" / "sft_then_grpo_sort.yaml"
    sft, grpo = (load_config(stages, [f"stage={name}"]) for name in ("sft", "grpo"))
    assert make_plan(sft, LARGE).devices[0].crowd == "1 training rank"
    assert make_plan(grpo, LARGE).devices[0].crowd == "1 training rank and 1 rollout replica"
    # 64 examples of 10 tokens are one micro-batch of 640, and of 20 one of 1280.
    small, large = (make_plan(sft, LARGE, tokens).needed for tokens in (10.0, 20.0))
    assert small < large < make_plan(sft, LARGE).needed


def test_training_and_generation_take_turns_where_weights_sleep():
    awake, asleep = (plan_of(*QWEN3_8B, *more).needed for more in ((), ("rollout.sleep=true",)))
    assert awake > asleep
    (device,) = plan_of(*QWEN3_8B, "rollout.sleep=true").devices
    rank, replica = device.shares
    kept = sum(part.size for part in rank.parts if part.when == "always")
    assert device.needed == kept + max(rank.peak - kept, replica.peak)


def test_micro_batches_are_no_larger_than_what_a_step_has():
    def tokens(**known):
        plan = plan_of("data.prompts_per_step=1", "rollout.samples_per_prompt=2", "rollout.max_new_tokens=40", **known)
        return next(part.how for part in plan.devices[0].shares[0].parts if part.name == "activations")

    assert tokens().startswith("16,384 tokens"), "the lengths of prompts are not known"
    assert tokens(prompt_tokens=9.6).startswith("100 tokens")


def test_a_run_that_does_not_fit_is_told_what_makes_it_fit():
    whole = plan_of(*QWEN3_8B)
    assert whole.fits is False
    tried = []

    def replan(more):
        tried.append(tuple(more))
        return plan_of(*QWEN3_8B, *more)

    alone, together = remedies(load_config(SORT, QWEN3_8B), whole, replan)
    assert [one.needed for one in alone] == sorted(one.needed for one in alone)
    assert all(one.needed < 0.98 * whole.needed for one in alone)
    assert together is not None
    again = make_plan(load_config(SORT, [*QWEN3_8B, *together.overrides]), LARGE)
    assert again.fits
    assert again.needed == together.needed
    fewer = make_plan(load_config(SORT, [*QWEN3_8B, *together.overrides[:-1]]), LARGE)
    assert not fewer.fits, "the last one was needed"


def test_what_a_configuration_refuses_is_not_proposed():
    alone, together = remedies(load_config(SORT, QWEN3_8B), plan_of(*QWEN3_8B), lambda more: None)
    assert (alone, together) == ([], None)


def test_every_candidate_is_a_valid_override():
    run = load_config(SORT)
    for override in candidates(run):
        assert load_config(SORT, [override]) != run, override


def test_an_engine_without_an_estimate_is_named(monkeypatch):
    monkeypatch.setattr("anytron.base.components.EngineInfo.load_memory", lambda self: None)
    with pytest.raises(ConfigError, match="the engine megatron has no memory estimate"):
        plan_of()


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_the_estimate_is_within_a_quarter_of_what_is_measured(name, tmp_path, started_cold):
    """The most memory that all processes have together, on the processor."""
    overrides, prompt_tokens = MEASURED[name]
    run = ["trainer.total_steps=3", "trainer.save_hf=false", f"trainer.output_dir={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "anytron", "train", str(SORT), *overrides, *run]
    measured = run_measured(command, memory=True, every_s=0.2)
    processor = DeviceMemory(None, accelerator=False)
    planned = plan_of(*overrides, device=processor, prompt_tokens=prompt_tokens).needed
    assert planned == pytest.approx(measured, rel=0.25)
