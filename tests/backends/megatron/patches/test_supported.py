"""The engine declares which Megatron it trains with, and refuses every other with the range."""

import pytest

from anytron.base.errors import PluginError
from anytron.device.loading import check_requirements, hooks_of
from anytron.device.patches.plan import in_range
from anytron_megatron.plugin import MegatronBackend


def test_another_megatron_is_refused_with_the_range(megatron_version):
    backend = MegatronBackend()
    (needed,) = [one for one in backend.requirements(None) if one.package == "megatron-core"]
    hooks = hooks_of(extensions={"megatron": backend})
    if in_range(megatron_version, needed.specifier):
        check_requirements(hooks)
    else:
        with pytest.raises(PluginError) as refused:
            check_requirements(hooks)
        assert f"needs megatron-core{needed.specifier}, {megatron_version} is installed" in refused.value.why
