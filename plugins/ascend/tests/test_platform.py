"""Options, environment, and what the platform says of a machine."""

import json
import os
import subprocess
import sys

import pytest

from anytron.base.errors import ConfigError
from anytron.config.schema import RunConfig
from anytron.device.loading import open_session
from anytron.run.preflight.limits import limit_diagnostics
from anytron_ascend import AscendPlatform, platform
from anytron_ascend.options import VISIBLE_DEVICES, AscendOptions, visible_devices_mistake, worker_environment


def test_the_options_are_typed():
    with pytest.raises(ConfigError, match="unknown key 'adapter'"):
        open_session(platform="ascend", options={"adapter": "none"})
    with pytest.raises(ConfigError, match="visible_devices"):
        open_session(platform="ascend", options={"visible_devices": "zero"})


def test_an_adaptor_that_is_not_available_is_refused_with_its_reason():
    with pytest.raises(ConfigError, match="megatron_adaptor is not available") as caught:
        open_session(platform="ascend", options={"adaptor": "megatron_adaptor"})
    assert "no package registry has MegatronAdaptor" in caught.value.why


def test_ray_counts_npus_and_the_runtime_s_variable_restricts_them():
    assert (AscendPlatform.ray_resource, AscendPlatform.visible_devices_variable) == (
        "NPU",
        "ASCEND_RT_VISIBLE_DEVICES",
    )


def test_worker_environment():
    plain = worker_environment(AscendOptions(), deterministic=False)
    assert plain == {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "HCCL_CONNECT_TIMEOUT": "600",
        "TORCH_NPU_FALLBACK_CPU_DISABLE": "1",
    }
    options = AscendOptions(expandable_segments=True, visible_devices="0,3", hccl_connect_timeout_s=900)
    assert worker_environment(options, deterministic=True) == {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "HCCL_CONNECT_TIMEOUT": "900",
        "TORCH_NPU_FALLBACK_CPU_DISABLE": "1",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        VISIBLE_DEVICES: "0,3",
        "HCCL_DETERMINISTIC": "true",
        "CLOSE_MATMUL_K_SHIFT": "1",
    }


@pytest.mark.parametrize("value", [None, "0", "0,1,7"])
def test_lists_that_the_driver_reads_are_fine(value):
    assert visible_devices_mistake({} if value is None else {VISIBLE_DEVICES: value}) == ""


@pytest.mark.parametrize(
    ("value", "text"), [("1,0", "not in ascending"), ("0,0", "not in ascending"), ("all", "not a list")]
)
def test_lists_at_which_the_driver_would_stop_in_silence_are_mistakes(value, text):
    assert text in visible_devices_mistake({VISIBLE_DEVICES: value})


def test_the_probe_says_broken_where_the_list_is_not_ascending(monkeypatch):
    monkeypatch.setenv(VISIBLE_DEVICES, "1,0")
    probe = AscendPlatform().probe()
    assert probe.availability.value == "broken"
    assert "ascending" in probe.reason


def plugins_list(**variables):
    environment_ = {**os.environ, "ANYTRON_PLATFORM": "ascend", **variables}
    command = [sys.executable, "-m", "anytron", "plugins", "list", "--json"]
    done = subprocess.run(command, env=environment_, capture_output=True, text=True, check=False, timeout=120)
    entries = json.loads(done.stdout)
    return next(entry for entry in entries if entry["name"] == "ascend")


def test_without_cann_the_list_shows_reason_and_remedy():
    entry = plugins_list(ANYTRON_ASCEND_SIMULATOR="")
    assert entry["state"] == "broken"
    assert "CANN cannot be used" in json.dumps(entry)
    assert "set_env.sh" in json.dumps(entry)


def test_on_the_simulator_the_platform_is_active():
    assert plugins_list()["state"] == "active"


GPT_OSS = {
    "model": {"config": {"model_type": "gpt_oss"}, "tokenizer": "tokenizer"},
    "data": {"source": "jsonl"},
    "rewards": [{"function": "exact"}],
}


def test_attention_sinks_are_declined_where_cann_has_no_operator_for_them(monkeypatch):
    config = RunConfig.model_validate(GPT_OSS)
    assert list(limit_diagnostics(config, AscendPlatform())) == []
    monkeypatch.setattr(platform, "_SINKS", ("aclnnFlashAttentionScore", "aclnnFlashAttentionScoreV99"))
    (refusal,) = limit_diagnostics(config, AscendPlatform())
    assert (refusal.severity, refusal.key) == ("error", "model.config")
    assert refusal.message == (
        "the platform ascend has no attention-sinks: this CANN has no aclnnFlashAttentionScoreV99, which came with "
        "CANN 8.5.0"
    )


@pytest.mark.parametrize(("simulated", "answer"), [("1", "True False"), ("", "False False")])
def test_cann_is_asked_for_an_operator_without_torch(simulated, answer, run_program):
    program = (
        "import sys\n"
        "from anytron_ascend.cann import has_operator\n"
        "print(has_operator('aclnnFlashAttentionScoreV3'), has_operator('aclnnNothing'))\n"
        "assert not {'torch', 'torch_npu'} & sys.modules.keys()\n"
    )
    (output,) = run_program(program, environment={"ANYTRON_ASCEND_SIMULATOR": simulated})
    assert output.splitlines()[-1] == answer
