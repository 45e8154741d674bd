"""LoRA settings that are refused before a process starts: names of layers, and adapters on disk."""

import json
import shutil

import pytest

from anytron.config.schema import RunConfig
from anytron_megatron.checks.lora import lora_diagnostics
from anytron_megatron.lora.names import ALL_LINEAR, LAYERS
from anytron_megatron.options import MegatronOptions
from tests.backends.megatron.lora.conftest import LORA


def complaints(*, frozen=(), engine=None, **settings):
    config = RunConfig.model_validate(
        {
            "model": {"path": "unused", "lora": settings, "freeze": list(frozen)},
            "data": {"source": "unused"},
            "rewards": [{"function": "unused"}],
            "engine": engine or {},
        }
    )
    return [(found.key, found.message, found.fix) for found in lora_diagnostics(config, MegatronOptions.of(config))]


def test_layers_are_called_as_megatron_calls_them():
    assert complaints(targets=[ALL_LINEAR, *LAYERS, "mlp.experts.linear_fc1"]) == []


def test_parts_need_not_be_frozen_one_by_one():
    ((key, message, remedy),) = complaints(frozen=["vision_tower"])

    assert (key, remedy) == ("model.freeze", "remove model.freeze")
    assert "freezes the whole model" in message


def test_modules_that_predict_ahead_are_not_trained():
    ((key, message, _),) = complaints(engine={"options": {"mtp_loss_coefficient": 0.1}})

    assert key == "engine.options.mtp_loss_coefficient"
    assert "freezes the multi-token prediction modules" in message


@pytest.mark.parametrize(
    ("target", "remedy"),
    [
        ("linear_qvk", "did you mean linear_qkv?"),
        ("all_linear", "did you mean all-linear?"),
        ("down_proj", "did you mean linear_fc2? Megatron keeps down_proj in one layer"),
        ("q_proj", "did you mean linear_qkv or linear_q_proj? Megatron keeps q_proj, k_proj, v_proj in one layer"),
        ("router", f"use all-linear, or some of {', '.join(LAYERS)}"),
    ],
)
def test_another_name_gets_the_one_that_was_meant(target, remedy):
    ((key, _, found),) = complaints(targets=["linear_proj", target])

    assert (key, found) == ("model.lora.targets", remedy)


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        ({"r": 8}, "model.lora.rank", "model.lora.rank is 4, but the adapter in model.lora.path has r=8"),
        ({"lora_alpha": 8}, "model.lora.alpha", "trained with the scale 4, but this configuration sets the scale 1.5"),
        (
            {"use_rslora": False},
            "model.lora.alpha",
            "trained with the scale 0.75, but this configuration sets the scale 1.5",
        ),
        ({"use_dora": True}, "model.lora.path", "use_dora=True"),
        ({"rank_pattern": {"q_proj": 2}}, "model.lora.path", "rank_pattern={'q_proj': 2}"),
        ({"modules_to_save": ["lm_head"]}, "model.lora.path", "modules_to_save=['lm_head']"),
        ({"peft_type": "IA3"}, "model.lora.path", "type IA3"),
    ],
)
def test_an_adapter_that_is_another_kind_is_named(change, key, words, random_adapter, tmp_path):
    shutil.copytree(random_adapter("qwen3"), tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    ((found, message, remedy),) = complaints(**LORA, path=str(tmp_path / "adapter"))

    assert found == key
    assert words in message
    assert remedy


def test_the_same_factor_may_be_written_in_two_ways(random_adapter, tmp_path):
    shutil.copytree(random_adapter("qwen3"), tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "use_rslora": False, "lora_alpha": 6}))

    assert complaints(**LORA, path=str(tmp_path / "adapter")) == []  # 6 / 4 = 3 / sqrt(4)


def test_a_directory_without_adapter_is_named(tmp_path, random_adapter):
    ((_, message, _),) = complaints(path=str(tmp_path))
    assert message == f"{tmp_path} has no adapter_config.json and no adapter_model.safetensors"
    assert complaints(**LORA, path=str(random_adapter("qwen3"))) == []

    shutil.copytree(random_adapter("qwen3"), tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").write_text("{")
    ((_, message, _),) = complaints(**LORA, path=str(tmp_path / "adapter"))
    assert "it is not JSON" in message


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("adapter_config.json", "[]", "of type list"),
        ("adapter_config.json", '{"peft_type": "LORA", "r": "8"}', "r: it must be a whole number"),
        ("adapter_config.json", '{"peft_type": "LORA", "lora_alpha": "big"}', "lora_alpha: it must be a finite number"),
        ("adapter_model.safetensors", "", "0 bytes"),
        # mcore-bridge would follow the index, whose tensors nobody has compared with the model's.
        ("model.safetensors.index.json", '{"weight_map": {}}', "that it lists, not adapter_model.safetensors"),
    ],
)
def test_a_malformed_adapter_is_refused(file, content, says, tmp_path, random_adapter):
    shutil.copytree(random_adapter("qwen3"), tmp_path / "adapter")
    (tmp_path / "adapter" / file).write_text(content)
    ((_, message, _),) = complaints(**LORA, path=str(tmp_path / "adapter"))
    assert says in message
