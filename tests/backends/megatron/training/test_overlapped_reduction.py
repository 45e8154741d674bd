"""Gradients that are reduced during the backward pass are those that are reduced after it."""

import pytest
import torch

from tests.slow import slow_but

OVERLAPPED = {"overlap_grad_reduce": True, "ddp_bucket_size": 1000}  # of 36 thousand: many buckets
ADAM = {"name": "adam", "lr": 1e-3}
SHARED = {"distributed_optimizer": True}


def assert_same(one, other):
    assert one.grad_norms == pytest.approx(other.grad_norms, rel=1e-6)
    for name, weight in one.weights.items():
        # Ranks share other elements of the norm, and Adam divides by the gradient's size, which may be near 0.
        torch.testing.assert_close(weight, other.weights[name], atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def plain(follow):
    """Two replicas, reduction after the backward pass, with either optimizer."""
    return {
        shared: follow(parallel={"data_parallel_size": 2}, engine={"distributed_optimizer": shared}, optimizer=ADAM)
        for shared in (False, True)
    }


@pytest.mark.some(1)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_it_changes_nothing(shared, recompute, plain, follow):
    engine = {"distributed_optimizer": shared, "recompute": recompute, "options": OVERLAPPED}
    assert_same(plain[shared], follow(parallel={"data_parallel_size": 2}, engine=engine, optimizer=ADAM))


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, 2])
def test_it_changes_nothing_in_a_pipeline(chunks, follow):
    """Interleaved schedules hold the reductions of all chunks back."""
    parallel = {"data_parallel_size": 2, "pipeline_model_parallel_size": 2}
    options = {"virtual_pipeline_model_parallel_size": chunks}
    one = follow(parallel=parallel, engine={**SHARED, "options": options}, optimizer=ADAM)
    other = follow(parallel=parallel, engine={**SHARED, "options": options | OVERLAPPED}, optimizer=ADAM)
    assert_same(one, other)


@pytest.mark.some(1)
@pytest.mark.parametrize("family", slow_but(["qwen3_moe", "deepseek_v3", "qwen3_next"], "deepseek_v3"))
def test_experts_without_tokens_are_waited_for_as_well(family, tiny_family, follow):
    """Their gradients are reduced in buckets of their own, over fewer ranks."""
    model = {"path": str(tiny_family(family))}
    parallel = {"data_parallel_size": 2, "expert_model_parallel_size": 2}
    one = follow(model=model, parallel=parallel, engine=SHARED, optimizer=ADAM)
    other = follow(model=model, parallel=parallel, engine={**SHARED, "options": OVERLAPPED}, optimizer=ADAM)
    assert_same(one, other)


def test_a_reduction_that_begins_too_early_shows(plain, follow, write_extension):
    """Sabotage: a bucket is reduced when the first of its gradients is there. This needs the overlapped way, too."""
    write_extension(
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.register_grad_ready",
        "lambda original: lambda self, parameter, force=False: (\n"
        "    original(self, parameter, force) if self.is_first_batch\n"
        "    else self.is_last_microbatch and self.grad_reduce_handle is None and self.start_grad_sync(force)\n"
        ")",
    )
    early = follow(parallel={"data_parallel_size": 2}, engine={**SHARED, "options": OVERLAPPED}, optimizer=ADAM)
    with pytest.raises(AssertionError):
        assert_same(plain[True], early)
