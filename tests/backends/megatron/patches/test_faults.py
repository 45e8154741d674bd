"""Faults of single versions of Megatron: shown on the versions that have them, cured there, unpatched elsewhere."""

import pytest

from anytron.patches.versions import in_range

AFFECTED = {
    "router": ("megatron.router-gemm", ">=0.13,<0.17", "te_general_gemm"),
    "checkpoint": ("megatron.checkpoint-format", "<0.13", "serialization_format"),
    "mtp": ("megatron.mtp-without-labels", "<0.17", "labels|NoneType"),
}


@pytest.fixture(scope="module")
def facts(run_program, tmp_path_factory):
    return run_program("faults.py", str(tmp_path_factory.mktemp("faults")))


@pytest.mark.parametrize("fault", AFFECTED)
def test_the_fault_is_there_without_the_patch_and_only_on_affected_versions(facts, fault, megatron_version):
    _, affected, symptom = AFFECTED[fault]
    if in_range(megatron_version, affected):
        assert any(word in facts["unpatched"][fault] for word in symptom.split("|")), facts["unpatched"][fault]
    else:
        assert facts["unpatched"][fault] in ("ok", "this version computes scores another way")


@pytest.mark.parametrize("fault", AFFECTED)
def test_the_patch_cures_it_where_it_applies_and_is_skipped_elsewhere(facts, fault, megatron_version):
    name, affected, _ = AFFECTED[fault]
    (record,) = [row for row in facts["report"] if row["id"] == name and row["outcome"] != "superseded"]
    assert facts["patched"][fault] in ("ok", "this version computes scores another way")
    assert record["outcome"] == ("applied" if in_range(megatron_version, affected) else "skipped")
    if record["outcome"] == "skipped":
        assert record["detail"] == f"megatron-core {megatron_version} is outside of {affected}"
