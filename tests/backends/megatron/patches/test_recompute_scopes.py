"""What Megatron recomputes in the backward pass runs in its own micro-batch's scope, on any thread."""

import pytest


@pytest.fixture(scope="module")
def seen(run_program):
    return run_program("scopes.py")


@pytest.mark.parametrize("way", ["checkpoint", "without_output", "te_checkpoint"])
def test_a_recomputation_sees_its_own_micro_batch_and_not_the_current_one(seen, way):
    assert seen["patched"][way] == [1, 1]


@pytest.mark.parametrize("way", ["checkpoint", "without_output", "te_checkpoint"])
def test_without_the_patch_it_sees_another_ones(seen, way):
    assert seen["unpatched"][way] == [1, 2]
