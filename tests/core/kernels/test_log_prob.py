"""The log-prob kernel, against torch's own softmax in float64."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from anytron.kernels.contract import LogProbSpec
from anytron.kernels.log_prob import NARROWEST_TILE, Cap, TorchTiles, make_log_prob, tile_width
from tests.log_prob_oracle import LargestTensor, Problem, assert_close

torch.set_num_threads(1)

PROGRAM = Path(__file__).parent / "programs" / "tensor_parallel.py"


@given(
    tokens=st.integers(0, 13),
    entries=st.sampled_from([11, 1100, 2600]),
    chunk=st.integers(1, 16),
    padding=st.integers(0, 3),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    seed=st.integers(0, 1000),
)
def test_log_probs_entropies_and_gradients_equal_the_definition(tokens, entries, chunk, padding, temperature, seed):
    problem = Problem.random(seed, tokens, entries, padding=padding, temperature=temperature)
    assert_close(problem.by_kernel(chunk), problem.by_definition())


@given(
    tokens=st.integers(0, 13),
    entries=st.sampled_from([11, 1100, 2600]),
    cap=st.sampled_from([0.5, 3.0, 30.0]),
    scale=st.sampled_from([0.2, 1.0, 2.0]),
    temperature=st.sampled_from([0.5, 1.7]),
    seed=st.integers(0, 1000),
)
def test_capped_logits_have_the_log_probs_entropies_and_gradients_of_the_definition(
    tokens, entries, cap, scale, temperature, seed
):
    problem = Problem.random(seed, tokens, entries, padding=2, temperature=temperature)
    assert_close(problem.by_kernel(2, TorchTiles(Cap(cap, scale))), problem.by_definition(cap=cap, scale=scale))


class WithoutTheSlope(TorchTiles):
    """Forgets that a cap makes gradients smaller."""

    def gradients(self, shard, upstream):
        for rows, grad in super().gradients(shard, upstream):
            logits = shard.hidden @ shard.weight[rows].t()
            yield rows, grad / (1 - torch.tanh(logits / 4.0) ** 2)


class WithoutTheScale(TorchTiles):
    """Forgets that a scale multiplies gradients."""

    def gradients(self, shard, upstream):
        return ((rows, grad / 0.75) for rows, grad in super().gradients(shard, upstream))


CAP = Cap(3.0, 0.75)


@pytest.mark.parametrize("sabotaged", [WithoutTheSlope(CAP), WithoutTheScale(CAP), TorchTiles(Cap(3.0)), TorchTiles()])
def test_the_comparison_notices_a_cap_that_is_wrong(sabotaged):
    problem = Problem.random(0, 13, 2600)
    expected = problem.by_definition(cap=3.0, scale=0.75)
    assert_close(problem.by_kernel(1, TorchTiles(CAP)), expected)
    with pytest.raises(AssertionError, match="differs"):
        assert_close(problem.by_kernel(1, sabotaged), expected)


class WithoutTheMean(TorchTiles):
    """Forgets the mean in the entropy's gradient."""

    def gradients(self, shard, upstream):
        upstream.mean.zero_()
        return super().gradients(shard, upstream)


class LastPeak(TorchTiles):
    """Takes every tile's peak for the highest one."""

    def statistics(self, shard):
        statistics = super().statistics(shard)
        statistics[:, 0] = statistics[-1, 0]
        return statistics


@pytest.mark.parametrize("sabotaged", [WithoutTheMean, LastPeak])
def test_the_comparison_notices_what_is_wrong(sabotaged):
    problem = Problem.random(0, 13, 2600)
    with pytest.raises(AssertionError, match="differs"):
        assert_close(problem.by_kernel(1, sabotaged()), problem.by_definition())


def test_with_bfloat16_operands_only_the_logits_and_the_gradients_are_rounded():
    problem = Problem.random(0, 13, 2600, dtype=torch.bfloat16)
    results = problem.by_kernel(1, dtype=torch.bfloat16)
    assert [result.dtype for result in results] == [torch.float32] * 2 + [torch.bfloat16] * 2
    # A product is rounded by up to 2**-9 of itself, and its probability by as large a part as that is.
    largest = (problem.hidden @ problem.weight.t()).abs().max().item()
    assert_close(results, problem.by_definition(), tolerance=2**-9 * largest)


def test_a_nearly_certain_distribution_is_as_exact_as_the_plain_path():
    """How exact that is depends on the processor's products of matrices."""
    errors = {"kernel": [0.0] * 4, "plain": [0.0] * 4}
    for seed in (208, 1, 2, 3, 4, 5):  # the first has a logit of 26 and an entropy of 0.16
        problem = Problem.random(seed, 2, 1100, padding=2, temperature=0.5)
        right = problem.by_definition()
        for path, results in {"kernel": problem.by_kernel(2), "plain": problem.by_definition(torch.float32)}.items():
            found = [(one - exact).abs().max().item() for one, exact in zip(results, right, strict=True)]
            errors[path] = [max(pair) for pair in zip(errors[path], found, strict=True)]
    for own, plain in zip(errors["kernel"], errors["plain"], strict=True):
        assert own <= 2 * plain < 1e-4, errors


@given(tokens=st.integers(1, 1 << 16), entries=st.integers(1, 160_000), chunk=st.integers(1, 1 << 16))
def test_a_tile_has_no_more_logits_than_a_chunk_or_is_as_narrow_as_makes_sense(tokens, entries, chunk):
    width = tile_width(tokens, entries, chunk)
    assert 1 <= width <= entries
    assert width * tokens <= max(chunk * entries, NARROWEST_TILE * tokens)


def test_nothing_is_larger_than_a_tile_in_the_forward_and_the_backward_pass():
    tokens, entries, chunk = 96, 8192, 12
    hidden, weight = torch.randn(tokens, 3, requires_grad=True), torch.randn(entries, 3, requires_grad=True)
    kernel = make_log_prob(LogProbSpec(entries, 1, chunk))
    with LargestTensor() as recorder:
        log_probs, entropy = kernel(hidden, weight, torch.zeros(tokens, dtype=torch.int64), 0.9, None)
        (log_probs + entropy).sum().backward()
    assert recorder.bytes == chunk * entries * 4


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "mm" in function.__name__
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("trained", "products"), [("hidden", 3), ("weight", 3), ("both", 4)])
def test_what_is_frozen_costs_no_product(trained, products):
    hidden = torch.randn(2, 3, requires_grad=trained != "weight")
    weight = torch.randn(7, 3, requires_grad=trained != "hidden")
    with Products() as recorder:
        log_probs, _ = make_log_prob(LogProbSpec(7, 1, 4))(hidden, weight, torch.tensor([1, 6]), 1.0, None)
        log_probs.sum().backward()
    assert recorder.count == products
    assert [hidden.grad is None, weight.grad is None] == [trained == "weight", trained == "hidden"]


@pytest.mark.parametrize("extreme", [1e4, -1e4])
def test_extreme_logits_stay_finite(extreme):
    kernel = make_log_prob(LogProbSpec(vocab_size=4, tensor_parallel=1, chunk_tokens=8))
    hidden = torch.full((2, 1), extreme, requires_grad=True)
    weight = torch.tensor([[1.0], [0.5], [-1.0], [0.0]], requires_grad=True)
    log_probs, entropy = kernel(hidden, weight, torch.tensor([0, 3]), 1.0, None)
    (log_probs + entropy).sum().backward()
    assert torch.isfinite(log_probs).all()
    assert torch.isfinite(entropy).all()
    assert torch.isfinite(hidden.grad).all()


def test_two_ranks_that_share_the_vocabulary_agree_with_one(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    commands = ([sys.executable, PROGRAM, str(rank), tmp_path / "meeting"] for rank in (0, 1))
    ranks = [subprocess.Popen(command, env=environment) for command in commands]
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
