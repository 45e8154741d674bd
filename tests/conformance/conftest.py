"""Platforms that are found by name, in every process of a test."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from tests.conformance.device_mutants import put_back
from tests.third_party_platform import SAMPLE, install_sdk


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def whole_libraries():
    yield
    put_back()


@pytest.fixture
def offer(tmp_path, monkeypatch):
    """Offer a platform under its name, as an installed distribution does."""
    monkeypatch.setenv("BASALT_DEVICES", "1")
    monkeypatch.setenv("ANYTRON_DISABLE_PLUGINS", "megatron")
    for path in (SAMPLE, *install_sdk(tmp_path)):
        monkeypatch.syspath_prepend(path)

    def offered(name, value):
        info = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[anytron.platforms]\n{name} = {value}\n")
        importlib.invalidate_caches()
        return name

    yield offered
    for name in [name for name in sys.modules if name.partition(".")[0] in ("anytron_basalt", "basalt_sdk")]:
        del sys.modules[name]
