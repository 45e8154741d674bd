"""The plugin from its own folder, as if it were installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parents[3] / "plugins" / "cuda"


@pytest.fixture
def plugin(monkeypatch):
    """Let ``anytron_cuda`` be imported; what is cached in its modules is forgotten with them."""
    monkeypatch.syspath_prepend(PLUGIN)
    yield PLUGIN
    for name in [name for name in sys.modules if name.partition(".")[0] == "anytron_cuda"]:
        del sys.modules[name]
