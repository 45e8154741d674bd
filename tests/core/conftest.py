"""A small platform with engines of its own, installed for a test: the folder ``testchip``.

That folder holds a ``.dist-info`` beside its modules, as ``site-packages`` does, and is put on
``sys.path`` of this process, whose workers inherit it, and of those that are started with ``PYTHONPATH``.
"""

import sys
from pathlib import Path

import pytest

SITE = Path(__file__).parent / "testchip"


@pytest.fixture
def testchip(monkeypatch):
    """Install it, and leave out the plugins that ship with Anytron; the path of its folder."""
    monkeypatch.syspath_prepend(str(SITE))
    monkeypatch.setenv("PYTHONPATH", str(SITE))
    monkeypatch.setenv("ANYTRON_DISABLE_PLUGINS", "cpu,megatron")
    yield SITE
    for name in ("testchip", "testchip_engine"):
        sys.modules.pop(name, None)
