"""The programs of benchmarks/on_a_gpu: scripts beside each other, which a bare Python must be able to run."""

from __future__ import annotations

import importlib
import sys

import pytest

from tests.house import ROOT

FOLDER = ROOT / "benchmarks" / "on_a_gpu"


@pytest.fixture
def load(monkeypatch):
    """Import one of them."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = {path.stem for path in FOLDER.glob("*.py")}
    yield importlib.import_module
    for name in names & set(sys.modules):
        del sys.modules[name]
