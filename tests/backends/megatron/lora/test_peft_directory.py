"""Adapters on disk: tensors are checked, and PEFT's configuration names the right layers."""

import shutil

import pytest

from anytron.base.errors import EngineError
from anytron_megatron.lora.peft_directory import peft_targets, require_same_tensors


def test_tensors_must_be_those_of_the_model(random_adapter, tmp_path):
    from safetensors.torch import load_file

    directory = random_adapter("qwen3")
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(directory / "adapter_model.safetensors").items()}
    first, *others = sorted(shapes)
    require_same_tensors(directory, shapes)

    with pytest.raises(
        EngineError, match=rf"do not have these tensors: {first}\n(?s:.)*add layers to model\.lora\.targets"
    ):
        require_same_tensors(directory, {name: shapes[name] for name in others})
    with pytest.raises(EngineError, match=r"tensors are missing: another\n"):
        require_same_tensors(directory, {**shapes, "another": (1, 1)})
    with pytest.raises(EngineError, match=rf"{first} has the shape .* but the model needs \(1, 1\)"):
        require_same_tensors(directory, {**shapes, first: (1, 1)})
    shutil.copytree(directory, tmp_path / "damaged")
    (tmp_path / "damaged" / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(EngineError, match="cannot be read"):
        require_same_tensors(tmp_path / "damaged", shapes)


def names(*modules):
    return [f"base_model.model.{module}.lora_{factor}.weight" for module in modules for factor in "AB"]


def test_peft_is_told_layers_by_the_last_part_of_their_names():
    given = names("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")

    assert peft_targets(given, experts=False, vision=False) == (["down_proj", "q_proj"], [])


def test_peft_is_told_whole_names_where_a_vision_tower_has_layers_of_the_same_name():
    given = names("model.language_model.layers.0.mlp.down_proj")

    assert peft_targets(given, experts=False, vision=True) == (["model.language_model.layers.0.mlp.down_proj"], [])


def test_peft_is_told_parameters_where_it_would_take_a_name_for_the_experts():
    given = names(
        "model.layers.0.mlp.up_proj",
        "model.layers.1.mlp.experts.0.up_proj",
        "model.layers.1.mlp.shared_experts.up_proj",
        "model.layers.1.self_attn.o_proj",
    )

    assert peft_targets(given, experts=True, vision=False) == (
        ["o_proj", "up_proj"],
        ["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.shared_experts.up_proj.weight"],
    )
