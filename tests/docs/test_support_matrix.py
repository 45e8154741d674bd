"""The support matrix shows results, and no stale ones: those in the files are of rules, cases and tests of the code."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from copy import deepcopy

import pytest

from anytron_conformance.rules import LEVELS, rules_of
from tests.docs import results, support_matrix
from tests.docs.measure import Measurement, measurements
from tests.docs.results import FOLDER, NOT_RUN, Measured, measured, of_case, of_test, worst
from tests.docs.support_matrix import GROUPS, KITS
from tests.house import ROOT

MEASURED_KITS = [name for name in KITS if results.path(name).exists()]
MEASURED_GROUPS = [name for name in GROUPS if results.path(name).exists()]
AGAIN = "it is of other code: run python -m tests.docs.measure"
NEW = ["device.own-operators", "model.parameters-keep-marks"]
KERNELS = [f"kernels.{name}" for name in (
    "invariant-attention", "invariant-log-prob", "invariant-model", "invariant-products", "invariant-rows",
    "invariant-values", "kernel-calls", "kernel-devices", "kernel-no-rows", "kernel-random-numbers", "layer-norm",
    "linear", "rms-norm", "rope", "state-space-scan",
)]  # fmt: skip
AWAITED = {
    "conformance-cuda": [NEW[0], *KERNELS, NEW[1]],
    "conformance-mindspeed": NEW[1:],
}
"""Rules that are newer than a measurement, or have newer cases (KERNELS: of Mamba-2's kernel, of linear layers, of many
rows in norms, of angles that differ by row), until python -m tests.docs.measure is run again: for CUDA on a GPU, for
MindSpeed with a checkout."""


def stale_rules(report, levels=LEVELS):
    """Rules of a report on some levels that are not the code's: missing, unknown, with other words, of other cases."""
    found = {rule["name"]: rule for rule in report["results"]}
    code = {rule.name: rule for level in levels for rule in rules_of(level)}
    stale = found.keys() ^ code.keys()
    for key in found.keys() & code.keys():
        one, rule = found[key], code[key]
        known = {*one["made"], *one["left_out"]}
        if one["notes"]["contract"] != rule.contract:
            stale.add(rule.name)
        if not callable(rule.cases):
            cases = {case.name for case in rule.cases}
            if not known <= cases or (one["status"] == "passed" and known != cases):
                stale.add(rule.name)
    return sorted(stale)


def stale_tests(name, outcomes):
    """Tests of a group that have no outcome, and outcomes of tests that it has not."""
    wanted = {proof.test for proof in GROUPS[name].proofs}
    missing = {test for test in wanted if of_test(made_up(outcomes), test) == NOT_RUN}
    return sorted(missing | {test for test in outcomes if not {test, test.partition("[")[0]} & wanted})


def made_up(found):
    return Measured("command", "2026-01-01", 1, {}, found)


def passed(rule):
    cases = [] if callable(rule.cases) else [case.name for case in rule.cases]
    return rule.result("passed", made=cases).as_json()


@pytest.fixture
def report():
    """The kit's report of a platform that keeps all rules."""
    return {"results": [passed(rule) for level in LEVELS for rule in rules_of(level)]}


def test_rules_and_cases_are_those_of_the_code():
    stale = {name: stale_rules(measured(name).found, KITS[name].levels or LEVELS) for name in MEASURED_KITS}
    assert stale == {name: AWAITED.get(name, []) for name in MEASURED_KITS}, AGAIN


def test_our_own_platforms_keep_the_rules_in_the_stored_results():
    """A measurement during which something else changed the environment was stored once, with two failed rules."""
    ours = [name for name in MEASURED_KITS if name.removeprefix("conformance-") in ("cpu", "basalt", "ascend", "cuda")]
    failed = {name: [rule["name"] for rule in measured(name).rules if rule["status"] == "failed"] for name in ours}
    assert failed == {name: [] for name in ours}, AGAIN


def test_outcomes_are_of_tests_of_the_code():
    stale = {name: stale_tests(name, measured(name).found) for name in MEASURED_GROUPS}
    assert stale == {name: [] for name in MEASURED_GROUPS}, AGAIN


def test_every_file_is_one_that_a_command_writes():
    others = set(FOLDER.glob("megatron-suite-*.json"))  # tests/megatron_lm
    assert {path.stem for path in set(FOLDER.glob("*")) - others} <= measurements().keys()


def test_stale_results_are_noticed(report):
    names = [rule["name"] for rule in report["results"]]
    first = names.index("model.model-logits")
    assert stale_rules(report) == []

    def changed(change):
        other = deepcopy(report)
        change(other["results"])
        return stale_rules(other)

    assert changed(lambda found: found.pop(first)) == [names[first]]
    assert changed(lambda found: found[first].update(name="old")) == sorted([names[first], "old"])
    assert changed(lambda found: found[first]["notes"].update(contract="It is right.")) == [names[first]]
    assert changed(lambda found: found[first]["made"].pop()) == [names[first]]
    assert changed(lambda found: found[first]["made"].append("GPT-2, one rank")) == [names[first]]
    name, group = next(iter(GROUPS.items()))
    outcomes = {proof.test: "passed" for proof in group.proofs}
    assert stale_tests(name, outcomes) == []
    gone = outcomes.popitem()[0]
    assert stale_tests(name, {**outcomes, "test_old.py::test_old": "passed"}) == sorted([gone, "test_old.py::test_old"])


RULE = {"name": "model.r", "status": "failed", "made": ["a"], "left_out": {"b": "no"}, "broken": "c"}


@pytest.mark.parametrize(
    ("case", "said"), [("a", "passed"), ("b", "skipped"), ("c", "failed"), ("d", NOT_RUN), ("other rule", NOT_RUN)]
)
def test_a_case_has_the_result_that_the_kit_found(case, said):
    one = made_up({"results": [RULE]})
    assert of_case(one, "model.other" if case == "other rule" else "model.r", case) == said
    assert of_case(None, "model.r", case) == NOT_RUN


def test_a_rule_that_is_declined_is_skipped_in_every_case():
    rule = {**RULE, "status": "skipped", "made": [], "left_out": {}, "broken": None}
    assert of_case(made_up({"results": [rule]}), "model.r", "a") == "skipped"


def test_a_test_has_the_worst_result_of_its_cases():
    one = made_up({"t.py::a[1]": "passed", "t.py::a[2]": "skipped", "t.py::ab": "failed"})
    assert of_test(one, "t.py::a") == "skipped"
    assert of_test(one, "t.py::a[1]") == "passed"
    assert of_test(one, "t.py::b") == of_test(None, "t.py::a") == NOT_RUN
    assert worst(["passed", NOT_RUN]) == NOT_RUN
    assert worst(["passed", NOT_RUN, "failed"]) == "failed"


def test_a_failure_and_a_missing_result_show_on_the_page(report, monkeypatch):
    def row():
        page = support_matrix.render()
        return page, next(line for line in page.partition("## cpu")[2].splitlines() if line.startswith("| Qwen3 |"))

    monkeypatch.setattr(support_matrix, "measured", lambda name: None)
    assert {cell.strip() for cell in row()[1].split("|")[2:-1]} == {NOT_RUN, ""}

    kit = made_up(report)
    monkeypatch.setattr(support_matrix, "measured", lambda name: kit if name == "conformance-cpu" else None)
    assert {cell.strip() for cell in row()[1].split("|")[2:-1]} == {"kit", NOT_RUN, ""}

    (rule,) = (one for one in kit.rules if one["name"] == "model.tensor-parallel")
    rule |= {"status": "failed", "broken": rule["made"][0], "made": []}
    page, line = row()
    assert "**kit fails**" in line
    assert f"[tensor-parallel](conformance.md#tensor-parallel) fails: {rule['broken']}" in page


@pytest.mark.parametrize("test", sorted({proof.test.partition("[")[0] for g in GROUPS.values() for proof in g.proofs}))
def test_what_shows_a_cell_is_a_test(test):
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_what_cannot_be_measured_is_named_with_the_reason(monkeypatch):
    monkeypatch.delenv("ANYTRON_MINDSPEED", raising=False)
    for name in ("conformance-mindspeed", "training-mindspeed"):
        assert measurements()[name].obstacle == "ANYTRON_MINDSPEED names no checkout"
    assert Measurement("granite", ()).obstacle
    assert measurements()["conformance-cpu"].obstacle == ""


def test_outcomes_of_tests_are_recorded(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', [1, 2])\ndef test_n(n):\n    assert n == 1\n"
        "def test_skipped():\n    pytest.skip('no device')\n"
        "@pytest.fixture\ndef broken():\n    yield\n    raise OSError\n"
        "def test_end(broken):\n    pass\n"
    )
    record = tmp_path / "record.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.docs.recording"]
    subprocess.run(
        [*command, "--rootdir", str(tmp_path), "--record", str(record), str(tmp_path)], cwd=ROOT, check=False
    )
    assert json.loads(record.read_text()) == {
        "test_it.py::test_n[1]": "passed",
        "test_it.py::test_n[2]": "failed",
        "test_it.py::test_skipped": "skipped",
        "test_it.py::test_end": "failed",
    }
