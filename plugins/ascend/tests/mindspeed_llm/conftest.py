"""Tests marked ``mindspeed_llm`` need what docs/how-to/train-with-mindspeed-llm.md installs, in one folder.

ANYTRON_MINDSPEED_LLM names it; in it are the checkouts ``MindSpeed-LLM``, ``MindSpeed`` and ``Megatron-LM``, and
``site``, what ``pip install --no-deps --target site`` made of the packages.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plugins.ascend.tests.trajectories import ROOT, follow
from tests.backends.megatron.conftest import recorded, tiny_family, tiny_model

__all__ = ["recorded", "tiny_family", "tiny_model"]

VARIABLE = "ANYTRON_MINDSPEED_LLM"

PACKAGES = {"mindspeed_llm": "MindSpeed-LLM", "mindspeed": "MindSpeed", "megatron": "Megatron-LM"}


@pytest.fixture
def with_mindspeed_llm(tmp_path) -> dict[str, str]:
    """The environment of processes that import MindSpeed-LLM: its package without the ``tests`` beside it."""
    folder, packages = Path(os.environ[VARIABLE]), tmp_path / "packages"
    packages.mkdir()
    for package, checkout in PACKAGES.items():
        (packages / package).symlink_to(folder / checkout / package)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(packages), str(folder / "site"), str(ROOT)])}


@pytest.fixture
def on_the_processor(recorded, tmp_path):
    """Follow the recorded trajectories with the engine ``megatron`` on the processor."""

    def run(engines):
        return follow(recorded, "cpu", {}, engines, tmp_path, {**os.environ, "PYTHONPATH": str(ROOT)})

    return run


@pytest.fixture
def with_the_engine(recorded, tmp_path, with_mindspeed_llm):
    """Follow them with the engine ``mindspeed_llm``; the rotary kernel that CANN would have to compile is off."""

    def run(engines):
        named = []
        for directory, sections in engines:
            options = {"model": {"fused_rotary_embedding": False}, "moe": {"grouped_gemm": False}}
            engine = {"name": "mindspeed_llm", "options": options, **sections.get("engine", {})}
            named.append((directory, {**sections, "engine": engine}))
        return follow(recorded, "ascend", {}, named, tmp_path, with_mindspeed_llm)

    return run
