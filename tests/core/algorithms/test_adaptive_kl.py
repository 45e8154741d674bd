"""The KL coefficient that follows the divergence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anytron.algorithms.kl import adapted, to_remember
from anytron.config.algorithm import AlgorithmSection

ALGORITHM = AlgorithmSection(kl_coefficient=0.1, kl_target=0.05, kl_horizon=1000.0)


def after(coefficient, divergence, samples=100, algorithm=ALGORITHM):
    return adapted(algorithm, {"kl/coefficient": coefficient, "policy/kl": divergence}, samples).kl_coefficient


def test_the_first_step_has_the_configurations_and_so_has_each_without_a_target():
    assert adapted(ALGORITHM, {}, 100) is ALGORITHM
    fixed = AlgorithmSection(kl_coefficient=0.1)
    assert adapted(fixed, {"kl/coefficient": 0.5, "policy/kl": 9.0}, 100) is fixed


def test_it_is_the_controller_of_the_paper():
    """arXiv:1909.08593, section 2.2, with K = samples / horizon = 0.1."""
    assert after(0.1, 0.055) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert after(0.1, 0.045) == pytest.approx(0.1 * (1 - 0.1 * 0.1))
    assert after(0.1, 5.0) == pytest.approx(0.1 * (1 + 0.1 * 0.2))
    assert after(0.1, 0.0) == pytest.approx(0.1 * (1 - 0.1 * 0.2))


def test_a_step_without_an_update_changes_nothing():
    assert after(0.3, float("nan")) == 0.3
    assert adapted(ALGORITHM, {"kl/coefficient": 0.3}, 100).kl_coefficient == 0.3


@given(st.floats(1e-3, 10), st.floats(0, 1e3), st.integers(1, 10**6))
def test_it_stays_positive_and_moves_by_a_fifth_at_most(coefficient, divergence, samples):
    assert 0.8 * coefficient * 0.999 <= after(coefficient, divergence, samples) <= 1.2 * coefficient * 1.001


def test_a_checkpoint_holds_what_the_next_step_needs():
    metrics = {"kl/coefficient": 0.3, "policy/kl": 0.2, "step": 4}
    assert adapted(ALGORITHM, to_remember(ALGORITHM, metrics), 100) == adapted(ALGORITHM, metrics, 100)
    assert to_remember(ALGORITHM, {"kl/coefficient": 0.3, "policy/kl": float("nan")}) == {"kl/coefficient": 0.3}
    assert to_remember(AlgorithmSection(kl_coefficient=0.1), metrics) == {}
