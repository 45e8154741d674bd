"""``python -m verl.trainer.main_ppo`` without hardware: the example, in verl's own Ray workers."""

from __future__ import annotations

import pytest

from plugins.verl.tests.example import steps_in, train
from plugins.verl.tests.expected import REPLACED, owners_in, replaced_in

RANKS = 2
TOKENS_IN_BFLOAT16 = 0.05
"""Megatron's probabilities of the tokens against those that they were drawn with: bfloat16 on both sides."""
PRELOAD = """
from anytron_ascend_simulator import preload
preload()
"""
"""Python runs it first in every process that Ray starts, as a machine with NPUs has CANN's libraries from the start."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """What the example leaves behind; it ends with an error if the reward is below 0.8."""
    path = tmp_path_factory.mktemp("verl")
    status, log = train(path)
    assert status == 0, log[-5000:]
    return path


@pytest.fixture(scope="module")
def steps(directory):
    return steps_in(directory)


pytestmark = pytest.mark.timeout(3600)


@pytest.mark.slow
def test_it_learns_to_sort(steps):
    rewards = [step["critic/score/mean"] for step in steps]
    assert rewards[0] < 0.3
    assert sum(rewards[-5:]) / 5 >= 0.8


@pytest.mark.slow
def test_greedy_responses_are_as_good(steps):
    (reward,) = (value for name, value in steps[-1].items() if name.startswith("val-core/sort_digits/"))
    assert reward >= 0.8


@pytest.mark.slow
def test_the_rollout_has_the_weights_that_are_trained(steps):
    assert max(step["training/rollout_probs_diff_max"] for step in steps) < TOKENS_IN_BFLOAT16
    assert min(step["training/rollout_actor_probs_pearson_corr"] for step in steps[5:]) > 0.999


@pytest.mark.slow
def test_both_workers_compute_with_anytrons_layouts(directory):
    assert replaced_in(directory) == [REPLACED] * RANKS


@pytest.mark.npu_simulator
def test_two_steps_on_simulated_npus(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(PRELOAD)
    status, log = train(
        tmp_path, "trainer.total_training_steps=2", ANYTRON_PLATFORM="ascend", PYTHONPATH=str(tmp_path),
        RAY_OVERRIDE_RESOURCES='{"NPU": 2}',  # Ray looks for the driver's devices, which nobody simulates
    )  # fmt: skip

    assert "steps of 2; {" in log, log[-5000:]
    assert status == 1  # two steps teach little
    steps = steps_in(tmp_path)
    assert all(step["actor/grad_norm"] > 0 for step in steps[:2])
    assert max(step["training/rollout_probs_diff_max"] for step in steps) < TOKENS_IN_BFLOAT16
    assert replaced_in(tmp_path) == [REPLACED] * RANKS
    assert all("ascend" in owners for owners in owners_in(tmp_path))
