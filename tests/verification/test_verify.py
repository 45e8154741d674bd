"""``anytron verify`` as a person runs it: what is right passes, and what is broken fails the check that is about it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from anytron.verification import CHECKS

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "grpo_sort.yaml"
PLUGIN = """
from anytron import hookimpl
from anytron.hooks.types import ConfigEdit
from anytron.kernels.log_prob import make_log_prob
from anytron.masks import AttnMask, MaskKind
from anytron.patches import Patch, Phase

def forgetting(original):
    return lambda tensor, group=None: tensor

def permuting(original):
    def export(self, chunks):
        for name, tensor in original(self, chunks):
            yield name, tensor.flip(0) if name.endswith("layers.0.mlp.down_proj.weight") else tensor
    return export

def cut_off(kernel):
    return lambda *given: tuple(values.detach() + 0.0 * values for values in kernel(*given))

class Sabotage:
    name = "sabotage"

    @hookimpl
    def configure(self, config):
        if {packed_only}:
            return [ConfigEdit("engine.sequence_format", "thd", "there is no padded layout on this chip")]

    @hookimpl
    def log_prob_kernel(self, spec):
        kernel = make_log_prob(spec)
        return cut_off(kernel) if {gradient} else kernel

    @hookimpl
    def build_attn_mask(self, request):
        if {mask}:
            return AttnMask(MaskKind.NONE, "padding")

    @hookimpl
    def patch_model(self, phase, context):
        if phase is not Phase.BEFORE_BUILD or context.role != "trainer":
            return []
        patches = [("megatron.core.tensor_parallel.mappings:_reduce", "sabotage:forgetting")] if {reduce} else []
        patches += [("anytron_megatron.models.bridge:BridgeSource.export", "sabotage:permuting")] if {export} else []
        return [Patch(id=f"sabotage.{{number}}", owner="sabotage", phase=phase, target=target, reason="a test",
                      replacement=replacement) for number, (target, replacement) in enumerate(patches)]
"""


@pytest.fixture
def install(tmp_path):
    """Write an extension that breaks what is named; give the environment in which it is installed."""

    def write(**broken: bool) -> dict[str, str]:
        settings = dict.fromkeys(("mask", "reduce", "export", "packed_only", "gradient"), False)
        (tmp_path / "sabotage.py").write_text(PLUGIN.format(**{**settings, **broken}))
        metadata = tmp_path / "sabotage-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sabotage\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text("[anytron.plugins]\nsabotage = sabotage:Sabotage\n")
        path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
        return {**os.environ, "PYTHONPATH": path}

    return write


def verify(*arguments: str, environment: dict[str, str] | None = None):
    command = [sys.executable, "-m", "anytron", "verify", str(EXAMPLE), *arguments]
    done = subprocess.run(
        command, env=environment or dict(os.environ), capture_output=True, text=True, check=False, timeout=500
    )
    return done.returncode, done.stdout, done.stderr


def verify_json(*arguments: str, environment: dict[str, str] | None = None):
    code, output, errors = verify(*arguments, "--json", environment=environment)
    assert output, errors
    results = json.loads(output)
    assert [result["check"] for result in results] == list(CHECKS)
    keys = {"check", "max_abs_diff", "tolerance", "status", "detail", "kernels"}
    assert all(set(result) == keys for result in results)
    return code, {result["check"]: result for result in results}


def with_status(results, status):
    return {name for name, result in results.items() if result["status"] == status}


def test_two_ranks_that_compute_right_pass_every_check():
    code, results = verify_json("parallel.tensor_model_parallel_size=2")
    assert code == 0
    assert with_status(results, "passed") == set(CHECKS), results
    assert all(result["max_abs_diff"] <= result["tolerance"] for result in results.values())
    assert results["export-equals-import"]["max_abs_diff"] == 0


def test_a_broken_sum_over_ranks_fails_what_compares_layouts(install):
    arguments = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=false")
    code, results = verify_json(*arguments, environment=install(reduce=True))
    assert code == 1
    # One rank alone needs no sum, so that the comparison with it shows the fault, as Hugging Face does.
    failing = {"hf-logits", "rollout-equals-training", "parallel-equals-single"}
    assert with_status(results, "failed") == failing, results


def test_a_wrong_mask_and_a_permuted_weight_fail_their_own_checks(install):
    code, results = verify_json(environment=install(mask=True, export=True, packed_only=True))
    assert code == 1
    assert results["mask-conformance"]["max_abs_diff"] > 1
    assert "down_proj" in results["export-equals-import"]["detail"]
    # The rollout engine has the permuted weight.
    failing = {"mask-conformance", "export-equals-import", "hf-logits", "rollout-equals-training"}
    assert with_status(results, "failed") == failing, results
    assert {name: results[name]["detail"] for name in with_status(results, "skipped")} == {
        "packed-equals-padded": "there is no bshd here: "
        "sabotage sets engine.sequence_format to 'thd': there is no padded layout on this chip",
        "parallel-equals-single": "the configured layout has one rank",
    }
    # Who supplied the kernels stands beside every result.
    kernels = results["mask-conformance"]["kernels"]
    assert (kernels["log_prob_kernel"], kernels["attention_kernel"]) == ("sabotage", "neutral-default")


def test_a_gradient_that_is_cut_off_is_not_equal_to_itself(install):
    code, results = verify_json(environment=install(gradient=True))
    assert code == 1
    assert with_status(results, "failed") == {"packed-equals-padded"}, results
    assert "gradient is 0" in results["packed-equals-padded"]["detail"]


def test_a_platform_with_a_kernel_mode_of_its_own_passes(tmp_path):
    """The toy's attention kernel also insists on what the scope of its micro-batch has set."""
    info = tmp_path / "anytron_toy-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: anytron-toy\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[anytron.platforms]\ntoy = anytron_toy:ToyPlatform\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "tests" / "plugins" / "toy_platform")])
    code, results = verify_json(environment={**os.environ, "PYTHONPATH": path, "TOY_DEVICE": "usable"})
    assert with_status(results, "failed") == set(), results
    assert code == 0
    assert "thd 'toy_lengths' attends as defined" in results["mask-conformance"]["detail"]


def test_a_configuration_that_cannot_run_is_refused_before_anything_starts():
    code, output, errors = verify("parallel.tensor_model_parallel_size=3", "--json")
    assert code == 1
    assert output == ""
    assert "cannot be split over 3 ranks" in errors


def test_a_signal_leaves_nothing_behind(tmp_path):
    command = [sys.executable, "-m", "anytron", "verify", str(EXAMPLE)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("anytron-verify-*/logs/trainer-0.log")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert "terminated by SIGTERM" in errors
    assert list(tmp_path.iterdir()) == []
