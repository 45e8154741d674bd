"""Platforms that are found by name, in every process of a test."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

TOY = Path(__file__).parents[1] / "plugins" / "toy_platform"


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def offer(tmp_path, monkeypatch):
    """Offer a platform under its name, as an installed distribution does."""
    monkeypatch.setenv("TOY_DEVICE", "usable")
    monkeypatch.setenv("ANYTRON_DISABLE_PLUGINS", "megatron")
    monkeypatch.syspath_prepend(TOY)
    monkeypatch.syspath_prepend(tmp_path)

    def offered(name, value):
        info = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[anytron.platforms]\n{name} = {value}\n")
        importlib.invalidate_caches()
        return name

    yield offered
    for name in [name for name in sys.modules if name.partition(".")[0] == "anytron_toy"]:
        del sys.modules[name]
