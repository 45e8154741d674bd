"""``engine.deterministic=true`` on two simulated NPUs."""

from tests.deterministic import assert_equal_runs


def test_two_deterministic_runs_are_equal(tmp_path):
    assert_equal_runs(tmp_path, {"ANYTRON_PLATFORM": "ascend"}, "parallel.tensor_model_parallel_size=2")
