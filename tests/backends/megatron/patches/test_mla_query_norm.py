"""Queries of latent attention that are not compressed have no norm: shown where Megatron adds one, cured there."""

import subprocess
import sys

import pytest

from anytron.device.patches.plan import in_range, installed_version
from tests.docs.reproductions import reproductions

AFFECTED = ">=0.19"


@pytest.fixture(scope="module")
def facts(run_program):
    return run_program("mla_query_norm.py")


@pytest.mark.slow
def test_versions_with_the_fault_add_a_norm(facts, megatron_version):
    affected = in_range(megatron_version, AFFECTED)
    assert facts["unpatched"] == (["layer_norm_weight", "weight"] if affected else ["weight"])


def test_the_patch_leaves_the_projection_alone_and_is_skipped_elsewhere(facts, megatron_version):
    assert facts["patched"] == ["weight"]
    assert facts["record"]["outcome"] == ("applied" if in_range(megatron_version, AFFECTED) else "skipped")


@pytest.mark.mcore
@pytest.mark.skipif(
    not in_range(installed_version("megatron-core"), ">=0.16"), reason="the program is for 0.16 and later"
)
def test_the_program_to_file_ends_with_0_where_the_fault_is_and_only_there(megatron_version):
    (fault,) = [one for one in reproductions("megatron-core") if "without `q_lora_rank`" in one.title]
    opened = "from anytron.device.stack import open_device_stack\nopen_device_stack('cpu')\n" + fault.text
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", opened], capture_output=True, text=True, timeout=240, check=False
    )
    if in_range(megatron_version, AFFECTED):
        assert done.returncode == 0, done.stderr
    else:
        assert "AssertionError" in done.stderr
        assert "['weight']" in done.stdout
