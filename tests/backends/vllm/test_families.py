"""Weights reach vLLM's models of every family that is called proved, and models that are split over processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from anytron_vllm.checks import PROVED, PROVED_WITH_IMAGES
from tests.house import ROOT
from tests.needs_vllm import NEEDS_TORCHVISION, NEEDS_VLLM, WITH_TORCHVISION

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = NEEDS_VLLM


def run(name: str, directory: Path, environment: Mapping[str, str] | None = None):
    """Run a program of this folder; return what its last line holds."""
    environment = {**(environment or {**os.environ, "PYTHONPATH": str(ROOT)}), "GLOO_SOCKET_IFNAME": "lo"}
    program = Path(__file__).parent / "programs" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, program, directory], capture_output=True, text=True, timeout=500, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_log_probs_follow_the_weights_in_every_family_and_a_lost_tensor_is_noticed(tmp_path):
    found = run("families", tmp_path)
    tested = {"qwen3", *found} & set(PROVED)  # qwen3: test_weights.py
    assert tested == set(PROVED)
    assert {family: found[family] for family in PROVED if family in found and found[family] > 5e-6} == {}
    for what in ("qwen2 not repacked", "qwen3_moe not repacked"):  # a tied head, and experts
        assert found[what] > 0.01, "this workaround for vLLM 0.32 has become unnecessary"
    lost, unusable = found["lost"]
    assert "did not load all weights of the model" in lost
    assert "model.layers.1.self_attn.qkv_proj" in lost
    assert "no weights" in unusable


@NEEDS_TORCHVISION
def test_log_probs_with_images_follow_the_weights_and_the_images(tmp_path):
    found = run("images", tmp_path, WITH_TORCHVISION)
    assert set(found) == {*PROVED_WITH_IMAGES, *(f"{family} logits" for family in PROVED_WITH_IMAGES)}
    assert {what: difference for what, difference in found.items() if difference > 1e-4} == {}


@pytest.mark.slow
def test_two_processes_share_a_model(tmp_path):
    found = run("tensor_parallel", tmp_path)
    assert found["difference"] < 5e-6
    assert "is missing" in found["refused"]
    assert found["as before"]
    assert found["left"] == []
