"""Where the rollout model lies; several devices are in plugins/ascend/tests/test_rollout_placement.py."""

import pytest

from anytron.errors import ConfigError
from tests.backends.rollout.conftest import engine_for, run_config


@pytest.mark.parametrize(("value", "why"), [("auto", "'auto' is not 'balanced'"), ("balanced", "device is here")])
def test_what_cannot_be_done_is_refused(value, why):
    with pytest.raises(ConfigError, match="cannot be placed") as caught:
        engine_for(run_config(options={"device_map": value}))
    assert why in caught.value.why
