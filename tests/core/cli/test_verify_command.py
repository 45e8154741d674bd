"""``anytron verify --verl`` without the package that knows verl."""

import pytest

from anytron.base.errors import ConfigError
from anytron.cli.check_commands import verify
from anytron.cli.checks import run_verification_of


def test_a_configuration_of_verl_needs_anytron_verl(tmp_path):
    with pytest.raises(ConfigError, match="anytron-verl is not installed") as error:
        run_verification_of("verl", tmp_path / "ppo.yaml", [], as_json=False)
    assert error.value.fix == "pip install anytron-verl"


def test_a_configuration_of_verl_is_not_shrunk(tmp_path):
    with pytest.raises(ConfigError, match="cannot be shrunk") as error:
        verify(tmp_path / "ppo.yaml", shrink=True, of_verl=True)
    assert error.value.where == "--verl --shrink"
