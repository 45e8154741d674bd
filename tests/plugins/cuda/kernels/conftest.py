"""The CUDA plugin as it is imported where it is installed, and stand-ins of the libraries that it calls."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.plugins.cuda.stand_ins import flash_attn_rotary, liger_kernel

PLUGIN = Path(__file__).parents[4] / "plugins" / "cuda"


@pytest.fixture(scope="module")
def kernels():
    """The package ``anytron_cuda.kernels``."""
    with pytest.MonkeyPatch.context() as patches:
        patches.syspath_prepend(PLUGIN)
        import anytron_cuda.kernels

        yield anytron_cuda.kernels
    for name in [name for name in sys.modules if name.partition(".")[0] == "anytron_cuda"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def libraries():
    """Make ``liger_kernel.ops`` and ``flash_attn.layers.rotary`` importable."""
    with pytest.MonkeyPatch.context() as patches:
        for name, module in {
            "liger_kernel": ModuleType("liger_kernel"),
            "liger_kernel.ops": liger_kernel,
            "flash_attn": ModuleType("flash_attn"),
            "flash_attn.layers": ModuleType("flash_attn.layers"),
            "flash_attn.layers.rotary": flash_attn_rotary,
        }.items():
            patches.setitem(sys.modules, name, module)
        yield
