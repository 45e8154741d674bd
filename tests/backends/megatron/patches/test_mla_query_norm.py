"""Queries of latent attention that are not compressed have no norm: shown where Megatron adds one, cured there."""

import pytest

from anytron.patches.versions import in_range

AFFECTED = ">=0.19"


@pytest.fixture(scope="module")
def facts(run_program):
    return run_program("mla_query_norm.py")


def test_versions_with_the_fault_add_a_norm(facts, megatron_version):
    affected = in_range(megatron_version, AFFECTED)
    assert facts["unpatched"] == (["layer_norm_weight", "weight"] if affected else ["weight"])


def test_the_patch_leaves_the_projection_alone_and_is_skipped_elsewhere(facts, megatron_version):
    assert facts["patched"] == ["weight"]
    assert facts["record"]["outcome"] == ("applied" if in_range(megatron_version, AFFECTED) else "skipped")
