"""Published faults that are made again: each has its entry, and the rule that must notice it does."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml

from anytron.config.schema import RunConfig
from anytron.proof.verification.objective import check_advantages, check_loss
from tests.conformance.verified import Laboratory
from tests.corpus import kernels, layouts, optimizers, positions, precision, rollouts
from tests.corpus.catalog import every_fault
from tests.corpus.fault import Fault
from tests.corpus.page import PAGE, with_tables
from tests.corpus.run import Here, explained, outcome_of
from tests.corpus.runs import RUNS
from tests.corpus.test_published import published
from tests.house import ROOT

OBJECTIVES = {"advantages": check_advantages, "loss": check_loss}
WITHOUT_ENGINE = [fault for fault in every_fault() if fault.rule in OBJECTIVES and fault.run in ("qwen3", "dual-clip")]
OF_KERNELS = [
    kernels.ValueGradientWrongForSlicesOfAFusedProjection,
    precision.WeightGradientSummedInHalfPrecision,
    positions.AnglesOfTheFirstRowForTheWholeBatch,
]
OF_ENGINES = [
    layouts.GateAndUpReorderedWhenACheckpointIsLoaded,
    kernels.HalfOfTheRotatedHeadNotStored,
    optimizers.GradientNormZeroSoNoClipping,
    rollouts.KernelReadsAStaleTransposedCopy,
]
"""Of four kinds, in the run that is quickest."""


class NothingBroken(Fault):
    """Breaks nothing."""

    run = "qwen3"


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    with Laboratory(tmp_path_factory.mktemp("laboratory"), RUNS) as Here.laboratory:
        yield Here.laboratory.healthy("qwen3")


def test_each_fault_is_made_after_an_entry_and_has_a_run():
    entries = {entry["name"] for entries in published().values() for entry in entries}
    faults = every_fault()
    names = [fault.entry() for fault in faults]
    assert set(names) <= entries
    assert len(set(names)) == len(names)
    assert {fault.run for fault in faults} <= RUNS.keys()
    assert all(fault.__doc__ for fault in faults)


def test_the_page_has_the_faults_and_their_rules():
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text) == text, "run python -m tests.corpus.page"


@pytest.mark.parametrize("fault", WITHOUT_ENGINE, ids=lambda fault: fault.entry())
def test_a_fault_of_an_objective_is_noticed(fault):
    tree = yaml.safe_load((ROOT / "examples" / "grpo_sort.yaml").read_text("utf-8"))
    algorithm = {"kl_coefficient": 0.05, "dual_clip": 1.5}
    config = RunConfig.model_validate({**tree, "algorithm": {**tree.get("algorithm", {}), **algorithm}})
    check = OBJECTIVES[fault.rule]
    assert check(fault.rule, config).status == "passed"
    with fault.breaks("driver"):
        assert check(fault.rule, config).status == "failed"
    assert check(fault.rule, config).status == "passed", "what it has exchanged is put back"


@pytest.mark.parametrize("fault", OF_KERNELS, ids=lambda fault: fault.entry())
def test_a_fault_of_a_kernel_is_noticed(fault):
    assert explained(fault)


@pytest.mark.parametrize("fault", OF_ENGINES, ids=lambda fault: fault.entry())
def test_a_fault_of_an_engine_changes_a_run_and_is_noticed(fault, healthy):
    assert outcome_of(fault, healthy).caught


@pytest.mark.parametrize("rule", ["attention-strides", "packed-equals-padded"])
def test_nothing_is_noticed_without_a_fault(rule, monkeypatch):
    """Nor is an error of another kind: the processor under a name that no distribution offers cannot start engines."""
    monkeypatch.setattr(NothingBroken, "rule", rule)
    assert explained(NothingBroken) == ""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_faults_of_engines_change_a_run_and_are_caught():
    names = ["output-bound-to-a-new-name", "hook-reduces-a-dummy", "kernel-reads-a-stale-transposed-copy"]
    command = [sys.executable, "-W", "ignore", ROOT / "tests" / "corpus" / "run.py", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 faults are caught" in done.stdout
