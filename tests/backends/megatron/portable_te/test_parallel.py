"""Layers split over real gloo ranks equal the whole layer, in outputs and gradients."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("mode", ["tensor_parallel", "sequence_parallel"])
def test_a_split_mlp_is_the_whole_mlp(run_program, mode):
    run_program("tensor_parallel.py", mode, ranks=2)


@pytest.mark.parametrize("mode", ["tensor_parallel", "sequence_parallel"])
def test_sums_of_company_invariant_layers_give_the_whole_mlp(run_program, mode):
    run_program("tensor_parallel.py", mode, "invariant", ranks=4)


def test_sums_over_more_than_two_ranks_have_one_order(run_program):
    run_program("ordered_sums.py", ranks=4)


@pytest.mark.parametrize("ranks", [2, 3])
def test_attention_over_split_sequences_is_attention_over_whole_ones(run_program, ranks):
    run_program("context_parallel.py", ranks=ranks)
