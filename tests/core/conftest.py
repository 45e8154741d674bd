"""A small platform with engines of its own, installed for a test: the folder ``testchip``.

That folder holds a ``.dist-info`` beside its modules, as ``site-packages`` does, and is put on
``sys.path`` of this process, whose workers inherit it, and of those that are started with ``PYTHONPATH``.
"""

import os
import sys
from pathlib import Path

import pytest

SITE = Path(__file__).parent / "testchip"


def install_testchip(patch):
    """Install it for as long as a ``MonkeyPatch`` lasts, and leave out the plugins that ship with Anytron."""
    patch.syspath_prepend(str(SITE))
    patch.setenv("PYTHONPATH", str(SITE), prepend=os.pathsep)
    patch.setenv("ANYTRON_DISABLE_PLUGINS", "cpu,megatron")
    for name in ("testchip", "testchip_engine"):
        patch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def testchip(monkeypatch):
    """The path of its folder, installed."""
    install_testchip(monkeypatch)
    yield SITE
    for name in ("testchip", "testchip_engine"):
        sys.modules.pop(name, None)
