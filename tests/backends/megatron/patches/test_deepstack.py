"""Qwen3-VL's deepstack in mcore-bridge: three faults, and the patch that cures them.

The tests of the unpatched model fail once mcore-bridge has fixed it: then the patch's range ends there.
"""

import pytest

from anytron.device.patches.plan import installed_version
from anytron_conformance.tiny_models import write_tiny_model

pytestmark = [
    pytest.mark.mcore,
    pytest.mark.skipif(not installed_version("mcore-bridge"), reason="mcore-bridge needs megatron-core 0.16 or later"),
]


@pytest.fixture(scope="module")
def deepstack(run_program, tmp_path_factory):
    directory = write_tiny_model("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))
    return run_program("deepstack.py", str(directory), world=2, tmp_path=directory)


@pytest.mark.slow
def test_features_reach_the_images_of_their_own_rows(deepstack):
    assert deepstack["upstream"]["padded"] > 1e-2
    assert deepstack["patched"]["padded"] < 1e-5


def test_rows_with_images_can_be_sharded(deepstack):
    assert "shape mismatch" in deepstack["upstream"]["context"]
    assert deepstack["patched"]["context"] == "ran"


def test_the_mergers_gradient_is_not_divided_by_the_tensor_parallel_size(deepstack):
    assert deepstack["upstream"]["gradient"] == pytest.approx(0.5, rel=1e-4)
    assert deepstack["patched"]["gradient"] == pytest.approx(1.0, rel=1e-4)
