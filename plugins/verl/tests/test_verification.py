"""``anytron verify --verl`` as a person runs it, on verl's own Megatron engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

CONFIGURATION = """
defaults:
  - ppo_trainer
  - override model_engine: megatron
  - _self_
actor_rollout_ref:
  model:
    path: {model}
    use_remove_padding: true
    override_config: {{attn_implementation: eager}}
  actor:
    megatron:
      dtype: float32
      override_transformer_config: {{attention_backend: auto}}
"""
MBRIDGE = "actor_rollout_ref.actor.megatron.vanilla_mbridge=true"
TENSOR_PARALLEL = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
CHECKS = [
    "hf-log-probs", "together-equals-alone", "packed-equals-padded", "parallel-equals-single", "finite-gradients",
]  # fmt: skip


@pytest.fixture(scope="module")
def configuration(model, tmp_path_factory):
    """A configuration of verl's, of a model whose rope theta is not the default 10000."""
    folder = tmp_path_factory.mktemp("verl")
    own = shutil.copytree(model, folder / "model")
    config = json.loads((own / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 1e6
    (own / "config.json").write_text(json.dumps(config))
    (folder / "run.yaml").write_text(CONFIGURATION.format(model=own))
    return folder / "run.yaml"


def verified(configuration, *overrides):
    """The exit status of the command, and its results by check."""
    done = subprocess.run(
        [sys.executable, "-m", "anytron", "verify", "--json", "--verl", str(configuration), *overrides],
        env={**os.environ, "ANYTRON_PLATFORM": "cpu"}, capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("["), done.stderr
    return done.returncode, {result["name"]: result for result in json.loads(done.stdout)["results"]}


def test_verl_with_mbridge_on_two_ranks_passes_every_check(configuration):
    status, results = verified(configuration, MBRIDGE, TENSOR_PARALLEL)
    assert {check: result["status"] for check, result in results.items()} == dict.fromkeys(CHECKS, "passed"), results
    assert status == 0


def test_the_rope_theta_that_megatron_bridge_loses_is_found(configuration):
    status, results = verified(configuration)
    assert {check: result["status"] for check, result in results.items()} == {
        "hf-log-probs": "failed",
        "together-equals-alone": "passed",
        "packed-equals-padded": "passed",
        "parallel-equals-single": "skipped",
        "finite-gradients": "passed",
    }, results
    wrong = results["hf-log-probs"]
    assert wrong["difference"] > 100 * wrong["tolerance"]
    assert status == 1
