"""``anytron plan``: its table, its JSON, its exit status, and sizes that are none."""

import json
import subprocess
import sys

import pytest

from anytron.base.components import TRAINING_ENGINES, component_names
from anytron.base.errors import ConfigError
from anytron.cli.plan import parse_size, run_plan
from tests.house import ROOT

EXAMPLE = ROOT / "examples" / "grpo_sort.yaml"


@pytest.fixture(autouse=True)
def on_the_processor(monkeypatch):
    monkeypatch.setenv("ANYTRON_PLATFORM", "cpu")


@pytest.mark.slow
def test_the_table_names_every_part_and_the_verdict(capsys):
    assert run_plan(EXAMPLE, [], memory="8GiB", as_json=False)
    shown = capsys.readouterr().out
    for part in ("parameters", "optimizer", "activations", "rollout-weights", "driver"):
        assert part in shown
    assert "of 8.00 GiB: it fits" in shown
    assert "cannot be read" not in shown


def test_a_run_that_does_not_fit_is_told_so_and_what_would_help(capsys):
    overrides = [
        "model.config.hidden_size=1024",
        "model.config.intermediate_size=4096",
        "model.config.num_hidden_layers=24",
    ]
    assert not run_plan(EXAMPLE, overrides, memory="3GiB", as_json=True)
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] is False
    assert plan["needed_bytes"] == max(device["needed_bytes"] for device in plan["devices"])
    assert plan["remedies"]
    assert all(one["needed_bytes"] < plan["needed_bytes"] for one in plan["remedies"])


@pytest.mark.slow
def test_prompts_that_cannot_be_read_are_no_error(capsys, tmp_path):
    missing = ["data.source=jsonl", f"data.options={{path: {tmp_path / 'nothing.jsonl'}}}"]
    run_plan(EXAMPLE, missing, memory="8GiB", as_json=False)
    assert "taken to be full" in capsys.readouterr().out


def test_a_run_for_npus_is_planned_with_their_package_or_without():
    command = [sys.executable, "-m", "anytron", "plan", "examples/npu/grpo_qwen3_8b.yaml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "8,190,735,360 parameters" in done.stdout
    assert "a device of training" in done.stdout
    without = "mindspeed_llm" not in component_names(TRAINING_ENGINES)
    assert ("no installed distribution offers the engine mindspeed_llm" in done.stdout) == without


@pytest.mark.slow
def test_what_nobody_offers_is_estimated_as_the_default_and_said(capsys):
    foreign = ["engine.name=elsewhere", "engine.options={theirs: 1}"]

    def plan(*overrides):
        run_plan(EXAMPLE, overrides, memory="8GiB", as_json=True)
        return json.loads(capsys.readouterr().out)

    own, found = plan("engine.options={}"), plan(*foreign)
    assert own["assumed"] == []
    (said,) = found.pop("assumed")
    assert said.endswith("offers the engine elsewhere: estimated as megatron with its default options")
    # Remedies too: each is estimated with the default engine.
    assert found == {name: value for name, value in own.items() if name != "assumed"}
    (device,) = plan(*foreign, "platform.name=elsewhere")["devices"]
    assert {process["who"] for process in device["processes"]} == {"training rank", "rollout replica"}
    run_plan(EXAMPLE, [*foreign, "platform.name=elsewhere"], memory="8GiB", as_json=False)
    shown = capsys.readouterr().out
    assert "offers the engine elsewhere" in shown
    assert "memory that is theirs alone: Platform 'elsewhere' is not installed." in shown


def test_a_file_that_is_no_configuration_is_an_error(tmp_path):
    (tmp_path / "run.yaml").write_text("model: {paht: x}\n")
    with pytest.raises(ConfigError, match="paht"):
        run_plan(tmp_path / "run.yaml", [], memory="8GiB", as_json=False)


@pytest.mark.parametrize(
    ("text", "size"), [("80", 80 << 30), ("1.5GiB", 3 << 29), ("512M", 512 << 20), ("2 TB", 2 << 40)]
)
def test_a_size_is_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-3", "many", "80 GiB of it", "nan", "1e9", "8kg"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="not a valid memory size"):
        parse_size(text)
