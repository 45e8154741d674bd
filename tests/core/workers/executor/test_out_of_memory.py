"""A device without memory: the error says how much there was, and which settings to lower."""

import pytest
import torch

from anytron.base.errors import ResourceError
from anytron.config.schema import RunConfig
from anytron.workers.executor.observer import BUILDING, advice, advice_for_scores
from anytron_cpu.runtime import CpuRuntime

HUGE = 2**50


def test_a_rank_whose_allocation_fails_says_what_to_lower(start):
    with pytest.raises(ResourceError, match=r"The device ran out of memory in allocate\(\)") as caught:
        start().call("allocate", HUGE)

    error = caught.value
    assert error.where == "trainer rank 0, simulated chip"
    assert f"you tried to allocate {4 * HUGE} bytes" in error.why
    assert "GiB allocated" in error.why
    assert "GiB at the peak" in error.why
    assert "parallel.tensor_model_parallel_size (now 1)" in error.fix
    assert "allocate(HUGE" not in str(error), "the traceback is its cause"
    assert "DefaultCPUAllocator" in error.__cause__.why


def test_a_loss_of_the_user_that_finds_no_memory_is_no_fault_of_its_own(start):
    with pytest.raises(ResourceError, match=r"out of memory in allocate_in_a_loss\(\)") as caught:
        start().call("allocate_in_a_loss", HUGE)

    assert f"you tried to allocate {4 * HUGE} bytes" in caught.value.why


def test_an_engine_too_large_to_build_says_so(start):
    with pytest.raises(ResourceError, match="ran out of memory while the engine was built"):
        start(engine="huge").call("echo")


def test_an_error_of_another_kind_stays_what_it_is():
    runtime = CpuRuntime()
    assert not runtime.is_out_of_memory(ValueError("memory"))
    assert runtime.is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as caught:
        torch.empty(HUGE)
    assert runtime.is_out_of_memory(caught.value)


def config(**sections) -> RunConfig:
    known = {"model": {"path": "x"}, "data": {"source": "jsonl"}, "rewards": [{"function": "exact_match"}]}
    return RunConfig.model_validate({**known, **sections})


@pytest.mark.parametrize(
    ("role", "method", "sections", "named", "unnamed"),
    [
        (
            "trainer",
            "update",
            {},
            [
                "max_tokens_per_micro_batch (now 16384)",
                "log_prob_chunk_tokens (now 256)",
                "recompute=full (now none)",
                "rollout.sleep=true",
                "pipeline_model_parallel_size (now 1)",
            ],
            ["distributed_optimizer", "kl_coefficient", "max_batch_size"],
        ),
        ("trainer", "score", {}, ["max_tokens_per_micro_batch"], ["recompute"]),
        (
            "trainer",
            "update",
            {
                "engine": {"recompute": "full", "distributed_optimizer": False},
                "parallel": {"data_parallel_size": 2},
                "rollout": {"sleep": True},
            },
            ["distributed_optimizer=true"],
            ["recompute", "rollout.sleep"],
        ),
        (
            "trainer",
            BUILDING,
            {"algorithm": {"kl_coefficient": 0.1}},
            ["kl_coefficient=0"],
            ["max_tokens_per_micro_batch"],
        ),
        (
            "rollout",
            "poll",
            {"rollout": {"options": {"gpu_memory_utilization": 0.5}}},
            ["max_batch_size (now 512)", "gpu_memory_utilization (now 0.5)", "engine.offload"],
            ["max_tokens_per_micro_batch"],
        ),
        (
            "rollout",
            "poll",
            {"engine": {"offload": ["optimizer"]}},
            ["max_batch_size"],
            ["gpu_memory_utilization", "engine.offload"],
        ),
    ],
)
def test_only_what_can_still_be_lowered_is_named(role, method, sections, named, unnamed):
    text = "; ".join(advice(config(**sections), role, method))
    assert [words for words in named if words not in text] == []
    assert [words for words in unnamed if words in text] == []


def test_a_reward_model_s_rank_names_its_own_settings():
    judged = {"rewards": [{"function": "reward_model"}], "reward_model": {"path": "m"}}
    found = "; ".join(advice_for_scores(config(**judged).of_reward_model))
    assert "reward_model.max_tokens_per_micro_batch (now 16384)" in found
    assert "reward_model.offload=true" in found
    assert "reward_model.parallel.tensor_model_parallel_size (now 1)" in found
