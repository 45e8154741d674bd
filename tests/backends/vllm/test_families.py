"""Weights reach vLLM's models of every family that is called proved, and models that are split over processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.version import Version

from anytron_vllm.checks import PROVED, PROVED_WITH_IMAGES
from anytron_vllm.installation import find_installation
from anytron_vllm.release import flaw
from tests.house import ROOT
from tests.needs_vllm import NEEDS_TORCHVISION, NEEDS_VLLM, WITH_TORCHVISION

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = NEEDS_VLLM
VERSION = installed.version if (installed := find_installation()) else "0"


def run(name: str, directory: Path, environment: Mapping[str, str] | None = None, *arguments: str):
    """Run a program of this folder; return what its last line holds."""
    environment = {**(environment or {**os.environ, "PYTHONPATH": str(ROOT)}), "GLOO_SOCKET_IFNAME": "lo"}
    program = Path(__file__).parent / "programs" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, program, directory, *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_log_probs_follow_the_weights_in_every_family_and_a_lost_tensor_is_noticed(tmp_path):
    families = [family for family in PROVED if family != "qwen3"]  # qwen3: test_weights.py
    if flaw(VERSION, "experts on a processor"):
        families.remove("qwen3_moe")
    found = run("families", tmp_path, None, *families)
    assert {family: found[family] for family in families if found[family] > 5e-6} == {}
    for family in {"qwen2", "qwen3_moe"} & set(families):  # a tied head, and experts
        stale = found[f"{family} not repacked"]
        assert (stale > 0.01) == (Version(VERSION) >= Version("0.28")), f"{family}: {stale} without repacking"
    lost, unusable = found["lost"]
    assert "did not load all weights of the model" in lost
    assert "model.layers.1.self_attn.qkv_proj" in lost
    assert "no weights" in unusable


@pytest.mark.skipif(bool(flaw(VERSION, "routing on a processor")), reason="this vLLM records no experts on a processor")
def test_the_experts_that_vllm_records_are_those_of_hugging_face_s_router(tmp_path):
    found = run("routing", tmp_path)
    assert found["preempted"] > 5, "responses must be computed again, or the test shows little"
    assert found["differing"] == [0, 0], "the second time prompts come from the prefix cache"
    assert found["differing after an update"] == 0
    assert found["of other weights"] > 100
    assert "stop" in found["stopped"]
    assert found["differing before a stop string"] == 0
    assert found["continued"] == [0, 0]


@pytest.mark.skipif(
    any(flaw(VERSION, asked) for asked in ("quantized weights", "quantized weights on a processor")),
    reason="this vLLM does not round weights on a processor",
)
def test_weights_in_8_bits_follow_each_update_and_are_rounded_as_the_other_engine_rounds_them(tmp_path):
    found = run("quantized", tmp_path)
    assert sum(found["rounded"]) < 0.75 * sum(found["not rounded"])
    assert max(found["rounded"]) < 0.1 * min(found["before"])


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
