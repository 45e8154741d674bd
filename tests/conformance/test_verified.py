"""``anytron verify`` alone catches every broken platform that changes a number in a run; the figure of the docs."""

from __future__ import annotations

import pytest

from tests.conformance import engine_mutants, kernel_mutants, sequence_mutants
from tests.conformance.mutant import Unbroken
from tests.conformance.verified import Laboratory, counted, difference, look_at_all
from tests.slow import slow_but

REPRESENTATIVE = {
    engine_mutants.AdamWithoutDecay: ("qwen3", {"optimizer-update"}),
    kernel_mutants.EntropyDoesNotLearn: ("qwen3", {"hf-gradients"}),
    sequence_mutants.RollsLabels: (
        "qwen3",
        {"hf-log-probs", "hf-gradients", "rollout-equals-training", "rollout-follows-updates"},
    ),
    engine_mutants.UntaughtCritic: ("critic", {"critic-gradients"}),
    engine_mutants.ForgottenAdapters: ("dropout", {"adapters-equal-merged"}),
    engine_mutants.UntaughtModules: ("mtp", {"multi-token-prediction"}),
}
"""The run that they change, and what fails for it."""
QUICK = (kernel_mutants.EntropyDoesNotLearn, sequence_mutants.RollsLabels)
"""The others are left to ``tox -e slow``."""


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory):
    with Laboratory(tmp_path_factory.mktemp("laboratory")) as made:
        yield made


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "mutant",
    [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in REPRESENTATIVE],
    ids=lambda mutant: mutant.__name__,
)
def test_what_changes_a_run_is_caught_by_the_check_that_is_about_it(mutant, laboratory):
    run, failing = REPRESENTATIVE[mutant]
    finding = laboratory.look(mutant, (run,))
    assert finding.run == run, finding
    assert not finding.ended, finding
    assert set(finding.checks) == failing, finding


@pytest.mark.slow
def test_what_breaks_its_contract_ends_the_run(laboratory):
    finding = laboratory.look(sequence_mutants.DropsLast)
    assert finding.ended
    assert "one entry for each real token" in finding.how


@pytest.mark.parametrize("run", slow_but(["qwen3", "critic", "mtp"], "qwen3"))
def test_a_platform_that_computes_as_the_processor_changes_nothing(run, laboratory, monkeypatch):
    """Two runs have the same numbers to the last digit, or no difference would mean anything."""
    monkeypatch.setattr("tests.conformance.verified.LIMIT", 0.0)
    finding = laboratory.look(Unbroken, (run,))
    assert (finding.run, finding.how) == (None, "")


@pytest.mark.parametrize("run", ["critic", "dropout", "mtp"])
def test_what_changes_nothing_passes(run, laboratory):
    assert laboratory.verify(Unbroken, run) == {}


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_one_that_changes_a_number_is_caught():
    found = counted(look_at_all(lambda finding: None))
    assert found["missed"] == []
    assert found["change_a_run"] == found["caught_by_verify"] > 50


def test_a_metric_that_is_missing_or_not_a_number_is_a_difference():
    healthy = [{"loss/total": 1.0, "time/step_s": 1.0}, {"loss/total": 2.0}]
    assert difference(healthy, [{"loss/total": 1.0, "time/step_s": 9.0}, {"loss/total": 2.0 + 1e-6}]) == ""
    assert difference(healthy, [{"loss/total": 1.0}, {"loss/total": 2.1}]) == "loss/total of step 2 by 0.05"
    assert difference(healthy, [{"loss/total": 1.0}, {}]) == "loss/total of step 2 by inf"
    assert difference(healthy, [{"loss/total": float("nan")}, {"loss/total": 2.0}]) == "loss/total of step 1 by inf"
