"""The recipes for published models: each set of settings in their headers is accepted, and fits its devices as planned.

No weights and no devices are needed: the published ``config.json`` says the sizes, and the checks are those of a run
on a machine that has neither.
"""

from __future__ import annotations

import re
import sys
from typing import NamedTuple

import pytest

from anytron.config.load import load_config
from anytron.engines.memory import DeviceMemory
from anytron.planning.plan import make_plan
from anytron.preflight.open_run import open_run
from tests.fake_vllm import install
from tests.house import ROOT

RECIPES = ROOT / "examples" / "recipes"
PARAMETERS = {"qwen3_8b": 8_190_735_360, "qwen3_30b_a3b": 30_532_122_624, "qwen2_5_vl_7b": 8_292_166_656}
"""Of the published models."""
LINE = re.compile(r"# (\d+) ([GN]PUs) of (\d+) GB: (\d+\.\d\d) GiB")
PLATFORMS = {"GPUs": "cuda", "NPUs": "ascend"}


class Row(NamedTuple):
    """Devices, and what the header of a recipe says of them."""

    recipe: str
    devices: int
    kind: str
    memory: int
    planned: str
    settings: tuple[str, ...]


def rows():
    """Read the headers."""
    for file in sorted(RECIPES.glob("*.yaml")):
        lines = iter(file.read_text().splitlines())
        for line in lines:
            if found := LINE.fullmatch(line):
                settings: list[str] = []
                while (line := next(lines)).startswith("#   "):
                    settings += line.removeprefix("#").split()
                devices, kind, memory, planned = found.groups()
                yield Row(file.stem, int(devices), kind, int(memory), planned, tuple(settings))


ROWS = [pytest.param(row, id=f"{row.recipe}-{row.devices}-{row.kind}") for row in rows()]


def run_of(row, *overrides):
    return load_config(RECIPES / f"{row.recipe}.yaml", [*row.settings, *overrides])


def test_every_model_is_there_on_8_and_on_64_devices_of_both_kinds():
    found = {(row.recipe, row.devices, row.kind, row.memory) for row in rows()}
    devices = {(8, "GPUs", 80), (64, "GPUs", 80), (8, "NPUs", 64), (64, "NPUs", 64)}
    assert found == {(recipe, *one) for recipe in PARAMETERS for one in devices}
    assert len(found) == len(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_it_fits_its_devices_as_its_header_says(row):
    plan = make_plan(run_of(row), DeviceMemory(row.memory << 30, accelerator=True))
    assert plan.parameters == PARAMETERS[row.recipe]
    assert f"{plan.needed / 2**30:.2f}" == row.planned
    assert plan.fits
    assert not any(device.tight for device in plan.devices), "a tenth is left for what no plan counts"
    assert not plan.silent


@pytest.mark.parametrize("row", ROWS)
def test_devices_and_replicas_are_as_many_as_it_says(row):
    run = run_of(row)
    assert run.platform.name == PLATFORMS[row.kind]
    assert run.parallel.world_size == row.devices
    assert (run.executor.kind == "ray") == (row.devices > 8), "a machine has 8"
    of_replica = run.rollout.options.get("tensor_parallel_size", 1)
    assert run.rollout.engine == "megatron" or run.rollout.replicas * of_replica == row.devices
    longest = (run.data.max_prompt_tokens or 0) + run.rollout.max_new_tokens
    assert run.engine.max_tokens_per_micro_batch == 2 * longest
    assert run.rollout.options.get("max_model_len", longest) == longest


@pytest.fixture
def directory(tmp_path, monkeypatch, request):
    """A model directory with all but weights and tokenizer, on a machine with a vLLM."""
    monkeypatch.setenv("ANYTRON_PLATFORM", "cpu")
    for name in ("vllm", "torchvision"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "site").mkdir()
    install(tmp_path / "site", "0.32.5", torchvision=True)
    monkeypatch.syspath_prepend(tmp_path / "site")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    return tmp_path


@pytest.mark.parametrize("row", ROWS)
def test_every_check_that_needs_no_weights_accepts_it(row, directory):
    here = ("platform.name=cpu", f"data.options.path={directory / 'prompts.jsonl'}", "resume=never")
    opened = open_run(RECIPES / f"{row.recipe}.yaml", [*row.settings, *here, f"trainer.output_dir={directory / 'run'}"])
    found = {(one.severity, one.key, one.message.partition(" (")[0]) for one in opened.diagnostics}
    model = opened.config.model.path
    missing = {("error", "model.path", f"{model} has no {what}") for what in ("weights", "tokenizer")}
    slow = {one for one in found if one[:2] == ("warning", "parallel")}  # that many ranks on so few processors
    assert found == missing | slow
