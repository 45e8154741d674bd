"""``engine.deterministic=true`` on the processor and on the sample platform; the NPU's is in plugins/ascend/tests."""

import os

import pytest

from tests.deterministic import assert_equal_runs
from tests.third_party_platform import USABLE, install_into


@pytest.mark.parametrize("split", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_two_deterministic_runs_on_the_processor_are_equal(tmp_path, split):
    assert_equal_runs(tmp_path, {"ANYTRON_PLATFORM": "cpu"}, f"parallel.tensor_model_parallel_size={split}")


@pytest.mark.slow
def test_two_deterministic_runs_on_the_sample_platform_are_equal(tmp_path):
    paths = [*install_into(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**USABLE, "ANYTRON_PLATFORM": "basalt", "PYTHONPATH": os.pathsep.join(paths)}
    assert_equal_runs(tmp_path, environment)
