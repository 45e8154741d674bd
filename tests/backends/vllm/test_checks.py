"""What vLLM would refuse after minutes, or compute wrongly, is found before a process starts. Needs no vLLM."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from anytron.base.errors import ConfigError
from anytron.config.anchor import anchor
from anytron.config.schema import RunConfig, default_run
from anytron.run.preflight.capabilities import platform_diagnostics
from anytron_cpu import CpuPlatform
from anytron_vllm.installation import find_installation, require_supported, require_torchvision
from anytron_vllm.options import VllmOptions
from anytron_vllm.start import NORMALIZED_IMAGES, engine_arguments
from tests.core.other_environment import make_environment
from tests.fake_vllm import install

MODEL = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
}
SEES = {"model_type": "qwen3_vl", "text_config": MODEL, "vision_config": {"num_heads": 2, "spatial_merge_size": 2}}
TENSOR_PARALLEL = "rollout.options.tensor_parallel_size"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder whose vLLM and torchvision, once they are there, are those that are installed."""
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    (tmp_path / "site").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path / "site"


@pytest.fixture
def installed(site):
    install(site, "0.32.5")


class Accelerator(CpuPlatform):
    accelerator = True


def found(model=None, platform=None, adapters=None, processor=None, dtype="bfloat16", **rollout):
    written = {"config": MODEL | (model or {}), "dtype": dtype, "tokenizer": "t.py:t"}
    values = {
        "model": {**written, "processor": processor, "lora": adapters},
        "data": {"source": "s.py:s"},
        "rewards": [{"function": "exact_match"}],
        "rollout": {"engine": "vllm", "max_new_tokens": 8, **rollout},
    }
    config = RunConfig.model_validate(values)
    return [
        (one.severity, one.key, f"{one.message} - {one.fix}")
        for one in platform_diagnostics(config, platform or CpuPlatform())
        if not one.key.startswith("engine")
    ]


def test_a_run_that_can_work_has_no_remarks(installed):
    assert found(options={"tensor_parallel_size": 2, "max_model_len": 64, "engine_args": {"block_size": 32}}) == []


def test_a_missing_vllm_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    ((severity, key, text),) = found()
    assert (severity, key) == ("error", "rollout.engine")
    assert "not installed" in text
    assert "pip install 'anytron[vllm]'" in text
    assert "rollout.python" in text


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.22.9", False),
        ("0.23.0", True),
        ("0.33.1", True),
        ("0.34.0", False),
        ("0.34.0rc1", False),
        ("0.23.0rc1", True),
    ],
)
def test_other_minor_versions_are_refused(site, version, supported):
    install(site, version)
    remarks = found()
    assert (remarks == []) == supported
    if supported:
        assert require_supported().version == version
    else:
        assert f"vLLM {version} is installed" in remarks[0][2]
        with pytest.raises(Exception, match=rf"vLLM {version} is installed"):
            require_supported()


def test_the_environment_of_rollout_python_counts(tmp_path):
    python = make_environment(tmp_path / "a venv", anytron=None)
    ((_, key, text),) = found(python=str(python))
    assert key == "rollout.engine"
    assert f"not installed in the environment of {python}" in text
    assert text.endswith(f"- '{python}' -m pip install 'anytron[vllm]'")
    (site,) = (tmp_path / "a venv").glob("lib/python3*/site-packages")
    install(site, "0.32.1")
    assert find_installation(str(python)).version == "0.32.1"
    assert found(python=str(python)) == []
    ((_, _, text),) = found(SEES, python=str(python), processor="p.py:p")
    assert (
        f"needs torchvision for a model that takes images, and it is not installed in the environment of {python}"
        in text
    )
    (site / "torchvision").mkdir()
    (site / "torchvision" / "__init__.py").touch()
    assert found(SEES, python=str(python), processor="p.py:p") == []


def test_models_that_take_images_need_torchvision_and_a_processor(site, monkeypatch):
    install(site, "0.32.5", torchvision=True)
    assert found(SEES, processor="p.py:p") == []
    assert [(severity, key) for severity, key, _ in found(SEES)] == [("error", "model.processor")]
    monkeypatch.setitem(sys.modules, "torchvision", None)
    ((severity, key, text),) = found(SEES, processor="p.py:p")
    assert (severity, key) == ("error", "rollout.engine")
    assert (
        "vLLM 0.32.5 needs torchvision for a model that takes images, and it is not installed in this environment"
        in text
    )
    assert "rollout.engine=transformers" in text


def test_images_on_a_version_that_no_test_has_run_with_them_are_a_warning(site):
    install(site, "0.31.0", torchvision=True)
    ((severity, key, text),) = found(SEES, processor="p.py:p")
    assert (severity, key) == ("warning", "rollout.engine")
    assert "vLLM 0.31.0 (tested: ==0.32.*)" in text


@pytest.mark.parametrize(
    ("version", "argument"), [("0.27.1", {}), ("0.28.0rc1", NORMALIZED_IMAGES), ("0.33.0", NORMALIZED_IMAGES)]
)
def test_images_are_normalised_once(version, argument):
    config = default_run({"rollout": {"engine": "vllm"}})
    options = VllmOptions.model_validate(config.rollout.options)
    given = {
        takes_images: engine_arguments(
            config, options, Path("model"), version=version, accelerator=False, takes_images=takes_images
        )
        for takes_images in (True, False)
    }
    assert {name: given[True][name] for name in given[True] if name.startswith("mm_device")} == argument
    assert not any(name.startswith("mm_") for name in given[False])


def test_a_torchvision_that_cannot_be_imported_is_an_error_with_its_reason(site):
    install(site, "0.32.5", torchvision=True)
    with pytest.raises(ConfigError, match="images without torchvision") as raised:
        require_torchvision()
    assert "the checks import no torchvision" in str(raised.value)
    assert "built for torch" in str(raised.value)


@pytest.mark.parametrize(
    ("model", "rollout", "key", "text"),
    [
        ({"head_dim": 16}, {}, "model.config.head_dim", "supports head sizes 32, 64, 80"),
        ({"head_dim": None, "hidden_size": 160}, {}, "model.config.head_dim", "not 40"),
        ({"architectures": ["OnlyEmbeds"]}, {}, "model.config", "vLLM 0.32.5 does not implement OnlyEmbeds"),
        (SEES | {"vision_config": {}}, {}, "model.config", "qwen3_vl, whose images Anytron does not read, with vLLM"),
        ({}, {"options": {"tensor_parallel_size": 3}}, TENSOR_PARALLEL, "4 attention heads"),
        (
            SEES | {"vision_config": {"num_heads": 3}},
            {"options": {"tensor_parallel_size": 2}},
            TENSOR_PARALLEL,
            "3 heads of the vision tower",
        ),
        (
            SEES,
            {"options": {"engine_args": {"mm_device_do_normalize": True}}},
            "rollout.options.engine_args.mm_device_do_normalize",
            "sets this argument itself",
        ),
        ({"num_key_value_heads": 3}, {"options": {"tensor_parallel_size": 2}}, TENSOR_PARALLEL, "3 key"),
        ({}, {"options": {"max_model_len": 8}}, "rollout.options.max_model_len", "leave no room for a prompt"),
        ({}, {"options": {"max_model_len": 65}}, "rollout.options.max_model_len", "the model's context of 64"),
        (
            {},
            {"options": {"engine_args": {"logprobs_mode": "processed_logprobs"}}},
            "rollout.options.engine_args.logprobs_mode",
            "sets this argument itself",
        ),
        ({}, {"options": {"engine_args": {"dtype": "half"}}}, "rollout.options.engine_args.dtype", "set model.dtype"),
        (
            {},
            {"options": {"engine_args": {"quantization": "fp8"}}},
            "rollout.options.engine_args.quantization",
            "set rollout.quantization instead",
        ),
        (
            {},
            {"options": {"engine_args": {"enable_chunked_prefill": True}}},
            "rollout.options.engine_args.enable_chunked_prefill",
            "only if it computes each prompt in one step - remove it",
        ),
        (
            {},
            {"options": {"max_num_batched_tokens": 63}},
            "rollout.options.max_num_batched_tokens",
            "sequences may have 64 tokens - set it to 64 or more, or lower rollout.options.max_model_len",
        ),
        (
            {},
            {"options": {"engine_args": {"enable_batch_sharded_sampling": True}}},
            "rollout.options.engine_args.enable_batch_sharded_sampling",
            "sets this argument itself",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_its_key(installed, model, rollout, key, text):
    remarks = found(model, **rollout)
    assert {severity for severity, _, _ in remarks} == {"error"}
    assert any(text in said for _, one, said in remarks if one == key)


def test_an_accelerator_may_compute_prompts_in_parts(installed):
    options = {"max_num_batched_tokens": 63, "engine_args": {"enable_chunked_prefill": True}}
    assert found(platform=Accelerator(), options=options) == []
    assert found(options={"max_num_batched_tokens": 32, "max_model_len": 32}) == []


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4}
ERNIES = {"model_type": "qwen3_moe", "moe_num_experts": 4}
"""With the field in which ERNIE-4.5 counts experts."""


@pytest.mark.parametrize(
    ("model", "platform", "rank", "key", "text"),
    [
        ({}, CpuPlatform(), 513, "model.lora.rank", "up to rank 512"),
        (EXPERTS, CpuPlatform(), 8, "rollout.lora", "Triton kernels for experts that have adapters"),
        (ERNIES, CpuPlatform(), 8, "rollout.lora", "Triton kernels for experts that have adapters"),
        (EXPERTS, Accelerator(), 8, "rollout.lora", "no test compares vLLM's log-probs of qwen3_moe with"),
    ],
)
def test_adapters_that_vllm_cannot_compute_with_are_refused_unless_they_are_merged(
    installed, model, platform, rank, key, text
):
    ((severity, named, said),) = found(model, platform, {"rank": rank}, lora="alone")
    assert (severity, named) == ("error", key)
    assert text in said
    assert "rollout.lora=merged" in said
    assert found(model, platform, {"rank": rank}) == []


ROUTED = {**EXPERTS, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("version", "text"),
    [
        ("0.26.0", "the record would hold zeros (vllm/model_executor/layers/fused_moe/cpu_fused_moe.py)"),
        ("0.29.0", "records none (vllm/model_executor/layers/fused_moe/experts/cpu_moe.py)"),
        ("0.30.0", ""),
        ("0.31.0", "needs Triton (vllm/config/vllm.py, _verify_aux_output_compatibility)"),
        ("0.32.5", "needs Triton"),
    ],
)
def test_versions_that_record_no_experts_on_a_processor_are_refused_there(site, version, text):
    install(site, version)
    remarks = found(ROUTED, replay_routing=True)
    assert (remarks == []) == (not text)
    for severity, key, said in remarks:
        assert (severity, key) == ("error", "rollout.replay_routing")
        assert f"vLLM {version} cannot record the experts of tokens on a processor: " in said
        assert text in said
    assert found(ROUTED, Accelerator(), replay_routing=True) == []


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0"])
@pytest.mark.parametrize(
    ("rollout", "text"),
    [
        ({"continue_over_updates": True, "max_staleness": 2}, "cannot record experts over an update of the weights"),
        ({"endpoint": {}}, "cannot record experts over an update of the weights"),
        ({"options": {"enable_prefix_caching": False}}, "rollout.options.enable_prefix_caching=false"),
    ],
)
def test_routing_that_later_versions_cannot_record_is_refused_for_these(site, version, rollout, text):
    install(site, version)
    ((severity, key, said),) = found(ROUTED, Accelerator(), replay_routing=True, **rollout)
    assert (severity, key) == ("error", "rollout.replay_routing")
    assert text in said
    (site / "vllm" / "_version.py").write_text("__version__ = version = '0.30.0'\n")
    assert found(ROUTED, Accelerator(), replay_routing=True, **rollout) == []


def test_the_routing_of_a_family_that_no_test_compares_is_refused(site):
    install(site, "0.30.0")
    remarks = found({"model_type": "other", "num_experts": 4}, replay_routing=True)
    ((severity, key, said),) = [one for one in remarks if one[0] == "error"]
    assert (severity, key) == ("error", "rollout.replay_routing")
    assert "the experts that vLLM records for other with what transformers chooses (tested: qwen3_moe)" in said


def test_rounded_weights_need_bfloat16_a_version_that_knows_them_and_on_a_processor_no_experts(site):
    install(site, "0.28.0")
    assert found({}, dtype="bfloat16", quantization="fp8") == []
    assert found({**MODEL, **EXPERTS}, Accelerator(), dtype="bfloat16", quantization="fp8") == []
    for model, dtype, text in (
        ({}, "float32", "bfloat16 models only, and model.dtype is float32 - set model.dtype=bfloat16"),
        (EXPERTS, "bfloat16", "lacks dynamic_per_token_scaled_fp8_quant"),
    ):
        remarks = [one for one in found(model, dtype=dtype, quantization="fp8") if one[1] == "rollout.quantization"]
        ((severity, _, said),) = remarks
        assert (severity, text in said) == ("error", True)
    for version, text in (
        ("0.27.1", "weights on a processor: it rounds them with dynamic_per_token_scaled_fp8_quant"),
        ("0.23.1", "weights: it does not know fp8_per_channel"),
    ):
        (site / "vllm" / "_version.py").write_text(f"__version__ = version = '{version}'\n")
        ((severity, key, said),) = found({}, dtype="bfloat16", quantization="fp8")
        assert (severity, key, f"vLLM {version} cannot round {text}" in said) == ("error", "rollout.quantization", True)
        assert (found({}, Accelerator(), dtype="bfloat16", quantization="fp8") == []) == (version == "0.27.1")


def test_adapters_that_vllm_was_seen_to_refuse_are_refused_for_its_reason(installed):
    remarks = found({"model_type": "glm4"}, Accelerator(), {"rank": 8}, lora="alone")
    ((_, key, said),) = [one for one in remarks if one[0] == "error"]
    assert key == "rollout.lora"
    assert "here both are one layer, gate_up_proj - set rollout.lora=merged" in said


def test_adapters_of_a_proved_family_may_come_alone(installed):
    assert found(adapters={"rank": 512}, lora="alone") == []


def test_head_sizes_are_those_of_the_processor_s_kernels_only(installed):
    assert found({"head_dim": 16}, Accelerator()) == []


@pytest.mark.parametrize(
    ("version", "text"),
    [
        ("0.24.0", "cpu_fused_moe.py"),
        ("0.25.1", ""),
        ("0.27.0rc1", "AMX kernel"),
        ("0.27.1", "AMX kernel"),
        ("0.28.0", ""),
        ("0.32.5", ""),
    ],
)
def test_versions_that_cannot_run_experts_on_a_processor_are_refused_there(site, version, text):
    install(site, version)
    remarks = found(EXPERTS)
    assert (remarks == []) == (not text)
    for severity, key, said in remarks:
        assert (severity, key) == ("error", "rollout.engine")
        assert f"vLLM {version} cannot run a model with experts on a processor" in said
        assert text in said
    assert found(EXPERTS, Accelerator()) == []


def test_a_family_that_no_test_compares_is_a_warning(installed):
    ((severity, key, text),) = found({"model_type": "other", "architectures": ["OtherForCausalLM"]})
    assert (severity, key) == ("warning", "model.config")
    assert "rollout_log_prob_tolerance" in text


def test_a_family_that_no_test_compares_with_images_is_a_warning(site):
    install(site, "0.32.5", torchvision=True)
    ((severity, key, text),) = found(SEES | {"model_type": "qwen3_5"}, processor="p.py:p")
    assert (severity, key) == ("warning", "model.config")
    assert "tested: qwen2_5_vl, qwen3_vl" in text


def test_the_config_of_a_directory_is_read(installed, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**MODEL, "head_dim": 8}))
    config = RunConfig.model_validate(
        {
            "model": {"path": "model", "dtype": "float32"},
            "data": {"source": "s.py:s"},
            "rewards": [{"function": "exact_match"}],
            "rollout": {"engine": "vllm", "max_new_tokens": 8},
        }
    )
    (one,) = [
        one for one in platform_diagnostics(anchor(config, tmp_path), CpuPlatform()) if one.key.startswith("model")
    ]
    assert "not 8" in one.message
