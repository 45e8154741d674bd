"""``anytron compare`` as a person runs it, and the error of a run that names it: saboteurs are found where they are."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from anytron.proof.comparing import CHECKS
from tests.verification.saboteur import with_saboteur

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "grpo_sort.yaml"
ON_THE_RANKS = ("rollout.engine=megatron", "engine.on_policy=bitwise")
SMALL = ("data.prompts_per_step=4", "rollout.samples_per_prompt=2")
"""Eight rows in generation, fewer than a saboteur's many, and more in training."""
PLUGIN = """
from anytron import hookimpl
from anytron.device.patches import Patch, Phase
from anytron.kernels.contract import KernelName

MANY = 16

def split(x, weight, bias):
    rows = x.numel() // x.shape[-1]
    cut = x.shape[-1] // 2 if rows > MANY else x.shape[-1]
    halves = [part @ other.t() for part, other in zip(x.tensor_split([cut], -1), weight.tensor_split([cut], -1))]
    product = sum(half for half in halves)
    return product if bias is None else product + bias

split.invariant = True  # a lie


def moved(module, args, output):
    return output * (1 + 1e-6) if output.shape[0] * output.shape[1] > MANY else output


def misled(original):
    from megatron.core.transformer.transformer_layer import TransformerLayer

    def policy(self, *arguments):
        chunks = original(self, *arguments)
        for chunk in chunks:
            for layer in chunk.module.modules():
                if isinstance(layer, TransformerLayer) and layer.layer_number == {layer}:  # counted from 1
                    layer.self_attention.q_layernorm.register_forward_hook(moved)
        return chunks
    return policy


class Sabotage:
    name = "sabotage"

    @hookimpl
    def fused_kernel(self, name, spec):
        return split if {linear} and name is KernelName.LINEAR else None

    @hookimpl
    def patch_model(self, phase, context):
        if phase is not Phase.BEFORE_BUILD or context.role != "trainer" or not {layer}:
            return []
        return [Patch(id="sabotage.layer", owner="sabotage", phase=phase, reason="a test",
                      target="anytron_megatron.building:ModelBuilder.policy", replacement="sabotage:misled")]
"""


@pytest.fixture
def install(tmp_path):
    """Write an extension with a saboteur; give the environment in which it is installed."""

    def write(*, linear: bool = False, layer: int = 0) -> dict[str, str]:
        return with_saboteur(tmp_path, PLUGIN.format(linear=linear, layer=layer))

    return write


def anytron(*arguments: str, environment: dict[str, str] | None = None):
    return subprocess.run(
        [sys.executable, "-m", "anytron", *arguments],
        env=environment or dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )


def compared(*arguments: str, environment: dict[str, str] | None = None):
    done = anytron("compare", *arguments, "--json", environment=environment)
    assert done.stdout, done.stderr
    results = json.loads(done.stdout)["results"]
    assert [result["name"] for result in results] == [check.name for check in CHECKS]
    return done.returncode, results


def test_kernels_that_do_not_depend_on_company_are_equal_everywhere():
    code, results = compared(str(EXAMPLE), *ON_THE_RANKS)
    assert code == 0
    assert {result["status"] for result in results} == {"passed"}
    assert all(re.search(r"\d\d tokens, \d\d modules and the log-probs", one["detail"]) for one in results[1:])


def test_where_bits_may_differ_the_command_says_where_they_do():
    code, results = compared(str(EXAMPLE), "rollout.engine=megatron")
    assert code == 0
    assert [result["status"] for result in results] == ["warning"] * 3
    assert all("layers.0." in result["notes"]["module"] for result in results[1:])


@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_the_first_module_is_named_with_its_layer_in_the_whole_model(install, split):
    code, results = compared(
        str(EXAMPLE),
        *ON_THE_RANKS,
        f"parallel.{split}_model_parallel_size=2",
        environment=install(layer=2),
    )
    assert code == 1
    assert [result["status"] for result in results] == ["failed"] * 3
    for result in results[1:]:
        assert result["notes"]["module"] == "decoder.layers.1.self_attention.q_layernorm"
        assert result["notes"]["tensor"] == "output"
        assert "first in layer 1: output of decoder.layers.1." in result["detail"]
        assert result["difference"] > 0


def test_a_run_ends_at_the_first_token_and_its_command_finds_the_kernel(install, tmp_path):
    environment = install(linear=True)
    settings = (*ON_THE_RANKS, *SMALL, "trainer.total_steps=2", f"trainer.output_dir={tmp_path / 'run'}")
    done = anytron("train", str(EXAMPLE), *settings, environment=environment)

    assert done.returncode == 1
    assert "error: A token's log-prob in training differs from the rollout's" in done.stderr
    assert re.search(r"where: token \d+, number \d of its response, in a sequence that begins with the", done.stderr)
    found = re.search(r"training computes (\S+), the rollout computed (\S+); in this micro-batch", done.stderr)
    assert float(found[1]) != float(found[2])
    samples = [path for path in (tmp_path / "run").rglob("*") if "samples" in path.name]
    assert samples, [*(tmp_path / "run").iterdir()]

    command = re.search(r"anytron (compare .*?config\.yaml);", done.stderr)
    code, results = compared(*shlex.split(command[1])[1:], environment=environment)
    assert code == 1
    first = results[2]["notes"]
    assert first["module"] == "decoder.layers.0.self_attention.linear_qkv", first
