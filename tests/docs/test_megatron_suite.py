"""The page of Megatron-LM's own tests: made of the stored results, in which few failures are gaps of Anytron's."""

import pytest

from tests.megatron_lm import outcomes
from tests.megatron_lm.page import PAGE, page, results

GAPS = 10
"""Most failures at one rank that no class explains."""


def test_the_page_is_made_of_the_stored_results():
    assert PAGE.read_text(encoding="utf-8") == page()


def test_no_failure_at_eight_ranks_is_a_gap():
    found = [one for one in results() if one["ranks"] == 8]
    assert found
    for one in found:
        assert outcomes.GAP not in one["classes"]
        assert sum(counts.get("passed", 0) for counts in one["folders"].values()) > 700


def test_few_failures_are_gaps():
    found = [one for one in results() if one["ranks"] == 1]
    assert found
    for one in found:
        named = one["classes"].get(outcomes.GAP, 0) + one["classes"].get("crashed", 0)
        assert len(one["gaps"]) == named
        assert one["classes"].get(outcomes.GAP, 0) <= GAPS
        assert sum(counts.get("passed", 0) for counts in one["folders"].values()) > 1000


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ({"type": "RuntimeError", "message": "world size (1) is not divisible by 8"}, "ranks"),
        ({"type": "EngineError", "message": "torch.cuda.CUDAGraph has no counterpart"}, "refused"),
        ({"type": "AssertionError", "message": "1.0 is not 2.0"}, outcomes.GAP),
        ({"type": "RuntimeError", "message": "Attempted to call copy_() on an invalid python storage."}, "torch"),
        ({"kind": "crashed"}, "crashed"),
    ],
)
def test_a_failure_is_classed_by_its_message(record, name):
    assert outcomes.class_of({"kind": "failed", "id": "tests/unit_tests/x.py::test", **record}) == name


def test_the_worst_rank_counts(tmp_path):
    files = [tmp_path / "0", tmp_path / "1"]
    passed = '{"id": "tests/unit_tests/moe/x.py::test", "when": "call", "outcome": "passed"}\n'
    failed = passed.replace("passed", "failed")
    files[0].write_text('{"start": "tests/unit_tests/moe/x.py::test"}\n' + passed)
    files[1].write_text(failed + '{"id": "cut o')
    found = outcomes.summary(outcomes.outcomes(files))
    assert found["folders"] == {"moe": {"crashed": 1}}, "it started on rank 0 and did not end"
    files[0].write_text('{"collected": ["tests/unit_tests/moe/x.py::test"]}\n' + passed)
    found = outcomes.summary(outcomes.outcomes(files))
    assert found["folders"] == {"moe": {"failed": 1}}
    assert list(found["gaps"]) == ["moe/x.py::test"]


def test_a_test_that_was_not_run_is_counted(tmp_path):
    (tmp_path / "0").write_text('{"collected": ["tests/unit_tests/moe/x.py::test"]}\n')
    assert outcomes.summary(outcomes.outcomes([tmp_path / "0"]))["folders"] == {"moe": {"not run": 1}}
