"""The plugin from its own folder, and stand-ins in the places of the libraries."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch.nn import functional

from tests.plugins.cuda.stand_ins import flash_attn, flash_attn_interface, torch_flash, torch_sdpa

PLUGIN = Path(__file__).parents[4] / "plugins" / "cuda"


@pytest.fixture(scope="module", autouse=True)
def plugin():
    """``anytron_cuda``, as if it were installed. For a module: hypothesis wants no fixture of a single test."""
    with pytest.MonkeyPatch.context() as patches:
        patches.syspath_prepend(PLUGIN)
        yield PLUGIN
        for name in [name for name in sys.modules if name.partition(".")[0] == "anytron_cuda"]:
            del sys.modules[name]


@pytest.fixture(scope="module")
def stand_ins(plugin):
    """FlashAttention 3 and 2, and torch's operators, as they are documented."""
    with pytest.MonkeyPatch.context() as patches, torch_flash.installed():
        patches.setitem(sys.modules, "flash_attn", flash_attn)
        patches.setitem(sys.modules, "flash_attn_interface", flash_attn_interface)
        patches.setattr(functional, "scaled_dot_product_attention", torch_sdpa.scaled_dot_product_attention)
        yield
