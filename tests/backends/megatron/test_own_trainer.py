"""The layer under a trainer that is not ours: a model of Megatron's own classes with multi-latent attention."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from anytron.hooks.types import OWN_TRAINER
from anytron.patches.versions import in_range, installed_version

VERSION = installed_version("megatron-core")
EXAMPLES = Path(__file__).parents[3] / "examples"
PROGRAM = Path(__file__).parent / "programs" / "own_trainer.py"


def run(engine):
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(EXAMPLES), engine],
        env={**os.environ, "PYTHONWARNINGS": "ignore"}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def facts():
    return run(OWN_TRAINER)


def test_packed_equals_padded_while_it_trains(facts):
    assert facts["thd"] == pytest.approx(facts["bshd"], rel=1e-5)
    assert facts["thd"][-1] < facts["thd"][0]


def test_a_phase_is_applied_once(facts):
    assert facts["again"] == 0


def test_leaving_undoes_everything(facts):
    assert facts["inside"]
    assert facts["torch"]
    assert facts["transformer_engine"] == []
    assert facts["patched"]
    assert facts["undone"]


@pytest.mark.mcore
@pytest.mark.skipif(not in_range(VERSION, "<0.18,!=0.16.2"), reason="this version has no fault")
def test_without_the_patches_of_megatrons_models_packed_attention_fails():
    sabotaged = run("an engine with models of its own")
    refusal = "ValueError: values must be as wide as queries"
    misshapen = "RuntimeError: Sizes of tensors must match"  # before 0.13 it does not get as far as the kernel
    assert sabotaged["thd"].startswith((refusal, misshapen)), sabotaged["thd"]
    assert isinstance(sabotaged["bshd"], list)


def test_without_the_layer_the_model_cannot_be_built():
    code = (
        "from types import SimpleNamespace as N\nimport torch, own_trainer\n"
        "runtime = N(current_device=lambda: torch.device('cpu'), communication_backend='gloo')\n"
        "layer = N(platform=N(runtime=lambda: runtime), apply_phase=lambda phase: None, hooks=None)\n"
        "own_trainer.start(layer)\nown_trainer.train(layer, 'thd', 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env={**os.environ, "PYTHONPATH": str(EXAMPLES)},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Error" in done.stderr.splitlines()[-1]
