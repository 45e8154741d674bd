"""Level ``kernels``: the sample's kernels pass."""

from __future__ import annotations

import pytest

from anytron.testing.levels import rules_of
from anytron.verification.report import Status
from tests.conformance.test_mutants import result_of

RULES = [rule.name for rule in rules_of("kernels")]


@pytest.mark.parametrize("name", RULES)
def test_the_sample_keeps_the_rule(name, tmp_path, offer):
    offer("basalt", "anytron_basalt:BasaltPlatform")
    from anytron_basalt import BasaltPlatform

    result = result_of(name, BasaltPlatform(), tmp_path)

    assert result.status is not Status.FAILED, result.explanation
