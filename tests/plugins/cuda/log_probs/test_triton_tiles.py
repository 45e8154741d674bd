"""The Triton kernels of log-probs, under Triton's interpreter (``tox -e triton``) and on a GPU, against the definition.

What Triton makes of a kernel is fixed when its file is imported, so a run has one of the two.
"""

import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anytron.kernels.contract import LogProbSpec
from tests.log_prob_oracle import LargestTensor, Problem, assert_close

PLUGIN = Path(__file__).parents[4] / "plugins" / "cuda"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-7}


@pytest.fixture(scope="module")
def tiles_of():
    """Make the arithmetic with other blocks: so small that operands have several, and are no multiples of them."""
    with pytest.MonkeyPatch.context() as patches:
        patches.syspath_prepend(PLUGIN)

        def make(**blocks):
            from anytron_cuda.log_probs.triton_tiles import Blocks, TritonTiles

            return TritonTiles(Blocks(**blocks))

        yield make
    for name in [name for name in sys.modules if name.partition(".")[0] == "anytron_cuda"]:
        del sys.modules[name]


@pytest.fixture
def chosen_here(tiles_of):
    """There is what the kernels need on a GPU: Triton, and a compiler with Python's headers."""
    from anytron_cuda.capabilities import capabilities
    from anytron_cuda.log_probs import TRITON, choose_log_prob

    choice = choose_log_prob(capabilities(), LogProbSpec(16, 1, 4, "cuda", torch.bfloat16))
    if choice.kernel != TRITON:
        pytest.skip(str(choice))


def interpreted(test):
    reason = "needs Triton and TRITON_INTERPRET=1: tox -e triton"
    return pytest.mark.triton(pytest.mark.skipif(not INTERPRETED, reason=reason)(test))


@interpreted
@settings(max_examples=15)  # the interpreter takes a tenth of a second for each block
@given(
    tokens=st.integers(0, 20),
    entries=st.sampled_from([11, 600, 2100]),
    size=st.integers(1, 20),
    padding=st.integers(0, 3),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    dtype=st.sampled_from([torch.float32, torch.float16]),  # the interpreter cannot multiply bfloat16
    seed=st.integers(0, 1000),
)
def test_log_probs_entropies_and_gradients_equal_the_definition(
    tiles_of, tokens, entries, size, padding, temperature, dtype, seed
):
    problem = Problem.random(seed, tokens, entries, padding=padding, size=size, temperature=temperature, dtype=dtype)
    results = problem.by_kernel(1, tiles_of(tokens=16, entries=512, inner=16), dtype)
    *values, _, _ = expected = problem.by_definition()
    assert_close(results, expected, tolerance=TOLERANCE[dtype])
    # Unlike the neutral kernel it does not round logits to 16 bits.
    assert_close(results[:2], values, tolerance=1e-5)


@interpreted
def test_the_blocks_that_gpus_get(tiles_of):
    problem = Problem.random(0, 130, 300, size=70)
    assert_close(problem.by_kernel(1, tiles_of()), problem.by_definition())


@interpreted
def test_the_comparison_notices_a_forgotten_mean(tiles_of):
    tiles, problem = tiles_of(tokens=16, entries=512, inner=16), Problem.random(0, 13, 300)
    made = tiles.gradients
    tiles.gradients = lambda shard, upstream: made(shard, replace(upstream, mean=0 * upstream.mean))
    with pytest.raises(AssertionError, match="hidden differs"):
        assert_close(problem.by_kernel(1, tiles), problem.by_definition())


@interpreted
def test_nothing_is_larger_than_a_tile(tiles_of):
    problem = Problem.random(0, 40, 8192, size=3)
    with LargestTensor() as recorder:
        problem.by_kernel(5, tiles_of(tokens=64, entries=1024, inner=16), torch.float16)
    assert recorder.bytes == 5 * 8192 * 2  # its gradients, in 16 bits


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED or torch.cuda.device_count() == 0, reason="needs a GPU")
@pytest.mark.usefixtures("chosen_here")
@pytest.mark.parametrize(
    ("tokens", "entries", "size"),
    [(700, 5000, 520), (1024, 8192, 1024), (1, 4999, 1024)],
    ids=["rows of any alignment", "rows that are loaded in large pieces", "one token"],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_gpu(tiles_of, dtype, tokens, entries, size):
    problem = Problem.random(0, tokens, entries, padding=8, size=size, temperature=size**0.5, dtype=dtype)
    results = problem.by_kernel(100, tiles_of(), dtype, "cuda")
    assert all(map(torch.equal, results, problem.by_kernel(100, tiles_of(), dtype, "cuda")))
    *values, _, _ = expected = problem.by_definition()
    assert_close(results, expected, tolerance=TOLERANCE[dtype])
    assert_close(results[:2], values, tolerance=1e-5)
