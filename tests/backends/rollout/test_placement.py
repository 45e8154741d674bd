"""Where the rollout model is; several devices are in plugins/ascend/tests/test_rollout_placement.py."""

import pytest

from anytron.base.errors import ConfigError
from tests.backends.rollout.conftest import engine_for, run_config


def test_one_device_has_nothing_to_spread_a_model_over():
    with pytest.raises(ConfigError, match="cannot be spread") as caught:
        engine_for(run_config(options={"device_map": "balanced"}))
    assert caught.value.why == "balanced needs at least two devices, but this process can use 1"
