"""From a file to a run that may start: everything that is wrong is found together, each with its place."""

import os

import pytest
from pydantic import BaseModel, ConfigDict

from anytron import hookimpl
from anytron.base.errors import ConfigError
from anytron.config.diagnostics import Diagnostic, refuse
from anytron.device.hooks.types import ConfigEdit, ProcessInfo
from anytron.device.loading import open_process
from anytron.device.platform import Decision
from anytron.run.preflight.open_run import open_run

RUN = """\
model:
  config: {model_type: qwen3}
  tokenizer: gone.py:tokenizer
data: {source: jsonl, options: {path: p.jsonl}}
rewards:
  - function: exact_match
engine:
  sequence_format: bshd
trainer:
  seed: 3
platform:
  name: testchip
"""


@pytest.fixture
def opened(testchip, monkeypatch, tmp_path):
    del testchip
    (tmp_path / "run.yaml").write_text(RUN)

    def opened(*overrides):
        return open_run(tmp_path / "run.yaml", overrides)

    return opened


def test_the_platform_comes_first_then_what_plugins_changed_then_warnings(opened, tmp_path):
    run = opened()
    lines = run.lines

    assert run.config.executor.num_threads == 1
    assert lines[0].startswith("platform: testchip (asked for by platform.name")
    assert lines[1] == "clock: slow (the tests are patient)"
    assert "testchip sets executor.num_threads to 1: the chip wants no help" in lines
    place = tmp_path / "run.yaml"
    warning = f"warning: trainer.seed ({place}:10): this chip ignores it (plugin 'testchip')"
    assert any(line.startswith(warning) for line in lines[2:])


def test_errors_of_plugins_and_of_the_machine_come_together_with_their_places(opened, tmp_path, monkeypatch):
    monkeypatch.setenv("ANYTRON_DISABLE_PLUGINS", "cpu")  # and not megatron
    run = opened("model.config.model_type=qwen33", "executor.kind=locale")

    with pytest.raises(ConfigError) as caught:
        refuse(run.diagnostics)
    message = str(caught.value)
    assert "The configuration has 3 mistakes." in message
    assert "model.config.model_type (command line: model.config.model_type=qwen33)" in message
    assert "(plugin 'megatron') - did you mean qwen3?" in message
    assert "executor.kind (command line: executor.kind=locale)" in message
    assert f"model.tokenizer ({tmp_path / 'run.yaml'}:3): there is no file" in message


def test_options_of_the_rollout_complete_those_that_the_user_has_set(opened, monkeypatch):
    import testchip

    key = "rollout.options.engine_args.additional_config"
    wanted = {
        f"{key}.layout.nz": 0,
        f"{key}.graphs": False,
        "rollout.options.enforce_eager": True,
        "rollout.options.gpu_memory_utilization": 0.5,
    }

    @hookimpl
    def configure(self, config):
        return [ConfigEdit(key, value, "the chip likes it", default=True) for key, value in wanted.items()]

    monkeypatch.setattr(testchip.TestChip, "configure", configure)
    set_here = ["rollout.options.gpu_memory_utilization=0.7", f"{key}.layout.nz=1", f"{key}.fast=true"]
    run = opened("rollout.engine=vllm", *set_here)
    options = run.config.rollout.options
    assert options["engine_args"] == {"additional_config": {"layout": {"nz": 1}, "graphs": False, "fast": True}}
    assert (options["enforce_eager"], options["gpu_memory_utilization"]) == (True, 0.7)
    assert "testchip sets rollout.options.enforce_eager to True: the chip likes it" in run.lines
    assert not any("gpu_memory_utilization" in line for line in run.lines)


def test_in_the_driver_the_platform_has_the_options_of_the_ranks(opened, monkeypatch):
    import testchip

    @hookimpl
    def configure(self, config):
        wanted = "fast" if config.trainer.seed == 3 else "slow"
        return [ConfigEdit("platform.options.clock", wanted, f"the seed is {config.trainer.seed}")]

    def configure_options(self, options):
        self.options = options

    monkeypatch.setattr(testchip.TestChip, "configure", configure)
    monkeypatch.setattr(testchip.TestChip, "options_model", Options)
    monkeypatch.setattr(testchip.TestChip, "configure_options", configure_options)
    monkeypatch.setattr(testchip.TestChip, "decisions", lambda self: [Decision("clock", self.options.clock, "as set")])
    run = opened()
    assert run.config.platform.options == {"clock": "fast"}
    assert run.lines[1] == "clock: fast (as set)"
    assert "testchip sets platform.options.clock to 'fast': the seed is 3" in run.lines

    monkeypatch.setenv("ANYTRON_PLATFORM_OPTIONS", '{"clock": "odd", "tile": 4}')
    run = opened()
    assert run.config.platform.options == {"clock": "fast", "tile": 4}, "plugins edit what the variable says"
    assert run.lines[1] == "clock: fast (as set)"
    monkeypatch.setattr(os, "environ", {**os.environ})  # which open_process adds to
    session = open_process(ProcessInfo("trainer"), run.config, platform="testchip", engine="megatron")
    assert session.platform.options == Options(clock="fast", tile=4)
    with pytest.raises(ConfigError, match="set in two places"):
        opened("platform.options={tile: 8}")


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    clock: str = "unknown"
    tile: int = 1


def test_one_error_is_shown_in_four_parts_and_warnings_refuse_nothing():
    error = Diagnostic("error", "trainer.seed", "it is odd", "make it even", "run.yaml:3")
    warning = Diagnostic("warning", "trainer.seed", "it is small")
    refuse([warning])

    with pytest.raises(ConfigError) as caught:
        refuse([warning, error])
    assert str(caught.value).splitlines() == [
        "The configuration has a mistake.",
        "  where: trainer.seed (run.yaml:3)",
        "  why: it is odd",
        "  fix: make it even",
    ]
