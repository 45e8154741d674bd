"""A fault of some versions of Megatron: shown on the versions that have it, cured there, unpatched elsewhere."""

import pytest

from anytron.device.patches.plan import in_range

AFFECTED = ">=0.13,<0.17"
FINE = ("ok", "this version computes scores another way")


@pytest.fixture(scope="module")
def facts(run_program):
    return run_program("faults.py")


def test_routers_fail_without_the_patch_on_affected_versions_only(facts, megatron_version):
    if in_range(megatron_version, AFFECTED):
        assert "te_general_gemm" in facts["unpatched"]
    else:
        assert facts["unpatched"] in FINE


def test_the_patch_cures_routers_where_it_applies_and_is_skipped_elsewhere(facts, megatron_version):
    (record,) = [row for row in facts["report"] if row["id"] == "megatron.router-gemm"]
    assert facts["patched"] in FINE
    assert record["outcome"] == ("applied" if in_range(megatron_version, AFFECTED) else "skipped")
    if record["outcome"] == "skipped":
        assert record["detail"] == f"megatron-core {megatron_version} is outside of {AFFECTED}"
