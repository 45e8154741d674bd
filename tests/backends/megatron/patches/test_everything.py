"""All patches of a training rank on the installed Megatron: applied, in effect, and taken back."""

import pytest


@pytest.fixture(scope="module")
def facts(run_program):
    return run_program("everything.py")


def test_everything_that_applies_is_in_effect(facts):
    assert facts["lost"] == []
    assert {row["outcome"] for row in facts["report"]} <= {"applied", "skipped", "superseded"}


def test_undoing_restores_everything_by_identity(facts):
    changed = set(facts["changed"])
    assert {"torch compile", "torch.cuda current_device", "CheckpointWithoutOutput checkpoint"} <= changed
    assert "megatron.core.tensor_parallel checkpoint" in changed  # imported there by name
    assert facts["left"] == []


def test_every_record_says_why(facts):
    for row in facts["report"]:
        assert row["reason"]
        assert row["remove_when"]
        assert row["detail"] or row["outcome"] == "applied"


def test_the_report_goes_to_the_log(facts, record_patches):
    record_patches(facts["report"])
