"""The recipes for published models are accepted, and fit their devices as their headers say.

No weights and no devices are needed: the published ``config.json`` says the sizes, and the checks are those of a run
on a machine that has neither. Those of the platforms themselves are in the tests of the platforms.
"""

from __future__ import annotations

import sys

import pytest

from anytron.proof.planning import make_plan
from anytron.run.preflight.open_run import open_run
from anytron.workers.engines.estimates import DeviceMemory
from tests.fake_vllm import install
from tests.recipes import FOLDER, recipes

PARAMETERS = {"qwen3_8b": 8_190_735_360, "qwen3_30b_a3b": 30_532_122_624, "qwen2_5_vl_7b": 8_292_166_656}
"""Of the published models."""
PLATFORMS = {"GPUs": "cuda", "NPUs": "ascend"}
MACHINE = 8
"""Devices in one."""

every_recipe = pytest.mark.parametrize("recipe", recipes(), ids=str)


def test_every_model_is_there_on_8_and_on_64_devices_of_both_kinds():
    found = [recipe[:4] for recipe in recipes()]
    devices = [(8, "GPUs", 80), (64, "GPUs", 80), (8, "NPUs", 64), (64, "NPUs", 64)]
    assert sorted(found) == sorted((name, *one) for name in PARAMETERS for one in devices)


@pytest.mark.some(4)
@every_recipe
def test_it_fits_its_devices_as_its_header_says(recipe):
    plan = make_plan(recipe.run(), DeviceMemory(recipe.memory << 30, accelerator=True))
    assert plan.parameters == PARAMETERS[recipe.name]
    assert f"{plan.needed / 2**30:.2f}" == recipe.planned
    assert plan.fits
    assert not any(device.tight for device in plan.devices), "a tenth is left for what no plan counts"
    assert not plan.silent


@every_recipe
def test_its_devices_replicas_and_lengths_agree(recipe):
    run = recipe.run()
    assert run.platform.name == PLATFORMS[recipe.kind]
    assert run.parallel.world_size == recipe.devices
    assert (run.executor.kind == "ray") == (recipe.devices > MACHINE)
    assert run.parallel.sizes().model <= MACHINE
    assert run.parallel.expert_model_parallel_size <= MACHINE
    of_replica = run.rollout.options.get("tensor_parallel_size", 1)
    assert run.rollout.engine == "megatron" or run.rollout.replicas * of_replica == recipe.devices
    longest = (run.data.max_prompt_tokens or 0) + run.rollout.max_new_tokens
    assert run.engine.max_tokens_per_micro_batch == 2 * longest
    assert run.rollout.options.get("max_model_len", longest) == longest


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A folder for a run on a machine with a vLLM and prompts."""
    for name in ("vllm", "torchvision"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "site").mkdir()
    install(tmp_path / "site", "0.32.5", torchvision=True)
    monkeypatch.syspath_prepend(tmp_path / "site")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    return tmp_path


@pytest.mark.some(4)
@every_recipe
def test_every_check_that_needs_no_weights_accepts_it(recipe, machine):
    here = ["platform.name=cpu", f"data.options.path={machine / 'prompts.jsonl'}"]
    settings = [*recipe.settings, *here, f"trainer.output_dir={machine / 'run'}"]
    opened = open_run(FOLDER / f"{recipe.name}.yaml", settings)
    found = {(one.severity, one.key, one.message.partition(" (")[0]) for one in opened.diagnostics}
    model = opened.config.model.path
    missing = {("error", "model.path", f"{model} has no {what}") for what in ("weights", "tokenizer")}
    slow = {one for one in found if one[:2] == ("warning", "parallel")}  # that many ranks on so few processors
    assert found == missing | slow
