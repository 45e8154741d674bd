"""The layer under a trainer that is not ours: a model of Megatron's own classes with multi-latent attention."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from anytron.device.hooks.types import OWN_TRAINER
from anytron.device.patches.plan import in_range, installed_version

VERSION = installed_version("megatron-core")
ROOT = Path(__file__).parents[3]
EXAMPLES, PAGE = ROOT / "examples", ROOT / "docs" / "how-to" / "use-in-your-own-trainer.md"
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


def test_yarn_is_built_where_torch_has_no_accelerator(facts):
    assert facts["yarn"] == "cpu"


def test_an_optimizer_that_would_update_nothing_is_refused(facts):
    assert facts["offload 0.0"] == [0.0, 0.0]
    refused = "EngineError: The optimizer's state cannot be offloaded to the host: the host is the device.\n"
    assert facts["offload 0.5"].startswith(refused)


def test_what_the_platform_declines_is_refused_with_its_reason(facts):
    refused = "ConfigError: The platform does not support this model.\n  where: platform cpu\n  why: "
    assert facts["without rows"]["thd"] == pytest.approx(facts["thd"], rel=1e-5)
    assert facts["without rows"]["bshd"].startswith(f"{refused}the platform cpu has no bshd: it has no rows\n")
    reason = "the platform cpu has no latent-attention: its kernels have one width\n"
    assert facts["without MLA"].startswith(refused + reason)


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
        "from anytron_megatron.own_trainer import join\n"
        "device = torch.device('cpu')\nnothing = lambda argument: None\n"
        "runtime = N(current_device=lambda: device, set_device=nothing, communication_backend='gloo')\n"
        "layer = N(platform=N(runtime=lambda: runtime), apply_phase=nothing, prepare=nothing, hooks=None)\n"
        "join(layer)\nown_trainer.train(layer, 'thd', 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env={**os.environ, "PYTHONPATH": str(EXAMPLES)},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Error" in done.stderr.splitlines()[-1]


def test_the_example_is_short_and_trains_as_the_page_says():
    assert len((EXAMPLES / "own_trainer.py").read_text(encoding="utf-8").splitlines()) <= 60
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXAMPLES / "own_trainer.py"), "3"],
        env={**os.environ, "ANYTRON_PLATFORM": "cpu"}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout, "cpu") == pytest.approx(losses(PAGE.read_text(encoding="utf-8"), "cpu"), abs=1e-4)


def losses(text, platform):
    """The losses that a run has printed, packed and padded."""
    found = re.findall(rf"^{platform} (?:thd|bshd): ([\d. ]+)$", text, re.MULTILINE)
    assert len(found) == 2, text
    return [float(one) for line in found for one in line.split()]
