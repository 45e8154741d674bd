"""Level ``kernels``: right platforms pass, and each broken kernel is caught by the rule that it breaks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from anytron.plugins import hooks_of
from anytron.plugins.session import Session
from anytron.testing.checking import check_rule
from anytron.testing.levels import find_rule, rules_of
from anytron.testing.results import Status
from anytron.testing.subject import Source, Subject
from anytron_cpu import CpuPlatform
from tests.conformance import attention_mutants, other_mutants
from tests.conformance.broken import BrokenPlatform, all_mutants

torch.set_num_threads(1)

TOY = Path(__file__).parents[1] / "plugins" / "toy_platform"
RANKS = "log-probs-tensor-parallel"
"""The rule that starts processes, which must find the platform by its name."""
MUTANTS = [*all_mutants(attention_mutants), *all_mutants(other_mutants)]


def subject_of(platform, tmp_path):
    session = Session(hooks_of(platform), platform, platform.probe(), "", (), ())
    return Subject(Source(platform.name), session, tmp_path)


def results_of(platform, tmp_path, rules=None):
    subject = subject_of(platform, tmp_path)
    try:
        return [check_rule(rule, subject) for rule in rules or rules_of("kernels") if rule.name != RANKS]
    finally:
        subject.close()


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setenv("TOY_DEVICE", "usable")
    monkeypatch.setattr(sys, "path", [str(TOY), *sys.path])
    from anytron_toy import ToyPlatform

    return ToyPlatform()


def explained(results, status):
    return [result.explanation for result in results if result.status is status]


def test_the_neutral_kernels_pass(tmp_path):
    results = results_of(CpuPlatform(), tmp_path)
    assert explained(results, Status.FAILED) == []
    assert explained(results, Status.SKIPPED) == []


def test_the_kernels_of_the_toy_pass(tmp_path, toy):
    assert explained(results_of(toy, tmp_path), Status.FAILED) == []


def test_a_base_that_breaks_nothing_passes(tmp_path):
    assert explained(results_of(BrokenPlatform(), tmp_path), Status.FAILED) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_kernel_is_caught_by_its_rule(mutant, tmp_path):
    (result,) = results_of(mutant(), tmp_path, [find_rule("kernels", mutant.rule)])
    assert result.status is Status.FAILED
    assert result.reason
    assert result.docs.endswith(f"#{mutant.rule}")


def test_every_rule_of_the_level_is_broken_by_something():
    """But for the one about ranks, which has a test of its own."""
    broken = {mutant.rule for mutant in MUTANTS}
    assert {rule.name for rule in rules_of("kernels")} - broken == {RANKS}
