"""Level ``kernels``: the sample's kernels pass, and every rule is broken by some mutant."""

from __future__ import annotations

import pytest

from anytron.testing.levels import rules_of
from anytron.verification.report import Status
from tests.conformance import attention_mutants, kernel_mutants
from tests.conformance.mutant import mutants_of
from tests.conformance.test_mutants import result_of

RULES = [rule.name for rule in rules_of("kernels")]


@pytest.mark.parametrize("name", RULES)
def test_the_sample_keeps_the_rule(name, tmp_path, offer):
    offer("basalt", "anytron_basalt:BasaltPlatform")
    from anytron_basalt import BasaltPlatform

    result = result_of(name, BasaltPlatform(), tmp_path)

    assert result.status is not Status.FAILED, result.explanation


def test_every_rule_is_broken_by_a_mutant():
    mutants = [*mutants_of(attention_mutants), *mutants_of(kernel_mutants)]
    assert {mutant.rule for mutant in mutants} == set(RULES)
