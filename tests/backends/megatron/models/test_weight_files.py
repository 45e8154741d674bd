"""Weights are judged by their headers, before an engine is built: each kind of damage is named."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from anytron.task.data.model_files import read_config, tensor_names
from anytron_megatron.models.families import FAMILIES
from anytron_megatron.models.weight_files import INDEX, SINGLE, weight_diagnostics
from tests.backends.megatron.families.published import write_published_model

JUDGED = ("llama", "qwen2", "qwen2_5", "qwen3", "qwen3_tied", "qwen3_moe", "deepseek_v3", "qwen2_5_vl")
DOWN = "model.layers.1.mlp.down_proj.weight"


def config_of(directory):
    return json.loads((directory / "config.json").read_text())


def expected_tensors(config):
    return FAMILIES[config["model_type"]].tensors(config)


def reasons(directory):
    return [found.message for found in weight_diagnostics("model.path", directory, config_of(directory))]


@pytest.fixture
def copy(tiny_model, tmp_path):
    return shutil.copytree(tiny_model, tmp_path / "model")


@pytest.fixture
def sharded(tiny_model, tmp_path):
    """The same weights in three files and an index."""
    directory = tmp_path / "sharded"
    directory.mkdir()
    (directory / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    weights = load_file(tiny_model / SINGLE)
    parts = [dict(sorted(weights.items())[start::3]) for start in range(3)]
    index = {}
    for number, part in enumerate(parts):
        save_file(part, directory / f"part-{number}.safetensors")
        index |= dict.fromkeys(part, f"part-{number}.safetensors")
    (directory / INDEX).write_text(json.dumps({"weight_map": index}))
    return directory


def change(directory, edit):
    weights = load_file(directory / SINGLE)
    edit(weights)
    save_file(weights, directory / SINGLE)


@pytest.mark.parametrize("family", JUDGED)
def test_expected_tensors_are_those_that_transformers_writes(family, tiny_family):
    directory = tiny_family(family)
    written = {name: tuple(tensor.shape) for name, tensor in load_file(directory / SINGLE).items()}
    assert expected_tensors(config_of(directory)) == written
    assert reasons(directory) == []


@pytest.mark.parametrize(
    "name", ["kimi_k25", "kimi_vl", "internvl_chat", "internvl_chat_moe", "ovis2_5", "llava_onevision1_5"]
)
def test_of_a_directory_with_other_models_the_language_models_tensors_are_judged(name, tmp_path):
    directory = write_published_model(name, tmp_path / name)
    known, outer = read_config(directory), tensor_names(directory).outer

    def found():
        return [one.message for one in weight_diagnostics("model.path", directory, known)]

    assert found() == []
    lost = "model.layers.1.self_attn.o_proj.weight"
    change(directory, lambda weights: weights.pop(outer(lost)))
    (message,) = found()
    assert f"tensors are missing: {lost}" in message
    change(directory, lambda weights: weights.update({outer(f"{lost}_packed"): torch.ones(2)}))
    (message,) = found()
    assert "1 weights are packed integers, which mcore-bridge does not read" in message


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"attention_bias": True}),  # as in MiMo's config
    ],
)
def test_biases_are_expected_where_the_config_and_the_code_have_them(family, changes, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    from anytron_conformance.tiny_models import CONFIGS

    fields = {**CONFIGS[family], **changes, "num_hidden_layers": 1}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).save_pretrained(tmp_path)
    assert reasons(tmp_path) == []


def test_a_config_that_leaves_sizes_to_defaults_and_an_unlisted_family_are_not_judged(tiny_model, tiny_family):
    config = config_of(tiny_model)
    assert expected_tensors({**config, "model_type": "qwen3_next"}) is None
    del config["num_key_value_heads"]
    assert expected_tensors(config) is None
    assert reasons(tiny_family("qwen3_vl")) == []


def test_of_a_vision_language_model_both_ways_to_name_tensors_are_read(tiny_family, tmp_path):
    """Published files and those of transformers 5 have ``visual.`` and ``model.``; its modules are called otherwise."""
    directory = shutil.copytree(tiny_family("qwen2_5_vl"), tmp_path / "model")

    def as_modules(weights):
        for name in list(weights):
            inside = (
                name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else f"model.{name}"
            )
            if name != "lm_head.weight":
                weights[inside] = weights.pop(name)

    change(directory, as_modules)
    assert any(name.startswith("model.language_model.layers.") for name in load_file(directory / SINGLE))
    assert reasons(directory) == []
    change(directory, lambda weights: weights.pop("model.visual.merger.mlp.2.bias"))
    (reason,) = reasons(directory)
    assert "1 of the model's" in reason
    assert "visual.merger.mlp.2.bias" in reason
    config = config_of(directory)
    assert expected_tensors({**config, "vision_config": {**config["vision_config"], "patch_size": [4, 4]}}) is None


def test_a_file_that_was_cut_short_is_found_by_its_size(copy):
    whole = (copy / SINGLE).read_bytes()
    for length in (len(whole) - 1, 3000, 200, 4, 0):
        (copy / SINGLE).write_bytes(whole[:length])
        (why,) = reasons(copy)
        assert why.startswith(f"{SINGLE}: the file has {length} bytes"), why
    (copy / SINGLE).write_bytes(b"version https://git-lfs.github.com/spec/v1\n" * 3)  # what a clone without LFS leaves
    (why,) = reasons(copy)
    assert "not a safetensors file" in why
    (copy / SINGLE).write_bytes((8).to_bytes(8, "little") + b"{broken}" + b"\0" * 8)
    (why,) = reasons(copy)
    assert "header cannot be read" in why


def test_a_missing_tensor_is_named(copy):
    change(copy, lambda weights: weights.pop(DOWN))
    (why,) = reasons(copy)
    total = len(load_file(copy / SINGLE)) + 1
    assert why == f"1 of the model's {total} tensors are missing: {DOWN}"


def test_many_are_counted_and_the_first_are_named(copy):
    change(copy, lambda weights: [weights.pop(name) for name in list(weights) if ".layers.3." in name])
    (why,) = reasons(copy)
    assert why.startswith("11 of the model's 47 tensors are missing: model.layers.3.input_layernorm.weight, ")
    assert why.endswith(", ...")
    assert why.count("model.layers.3.") == 3


def test_a_tensor_of_another_shape_is_named_with_both_shapes(copy):
    change(copy, lambda weights: weights.update({DOWN: weights[DOWN][:-1].clone()}))
    (why,) = reasons(copy)
    assert DOWN in why
    assert "has (31, 64), the config says (32, 64)" in why


def test_an_extra_tensor_is_an_error_unless_it_says_nothing_new(copy):
    def add(name):
        change(copy, lambda weights: weights.update({name: weights[DOWN].clone()}))

    add("model.layers.0.self_attn.rotary_emb.inv_freq")
    add("model.layers.4.eh_proj.weight")  # a multi-token prediction module
    add("model.mtp_layers.0.mlp.down_proj.weight")  # one of MiMo's
    assert reasons(copy) == []
    add("model.layers.1.mlp.extra.weight")
    (why,) = reasons(copy)
    assert "1 of 51 tensors do not belong to the model: model.layers.1.mlp.extra.weight" in why


def test_a_tied_models_copy_of_its_embedding_is_let_pass(tiny_family, tmp_path):
    directory = shutil.copytree(tiny_family("qwen3_tied"), tmp_path / "model")
    change(directory, lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"].clone()}))
    assert reasons(directory) == []


def test_weights_of_another_architecture_say_so(copy, tiny_family):
    shutil.copy(tiny_family("deepseek_v3") / SINGLE, copy / SINGLE)
    missing, unknown, shapes = reasons(copy)
    assert "tensors are missing: model.layers.0.self_attn.k_norm.weight" in missing
    assert "do not belong to the model: model.layers.0.self_attn.kv_a_layernorm.weight" in unknown
    assert "lm_head.weight has (128, 64), the config says (97, 32)" in shapes


def test_whole_shards_are_not_remarked_on(sharded):
    assert reasons(sharded) == []


def test_a_missing_shard_is_named(sharded):
    (sharded / "part-1.safetensors").unlink()
    assert reasons(sharded) == [f"1 of 3 files in {INDEX} are missing: part-1.safetensors"]


def test_a_damaged_shard_is_named(sharded):
    path = sharded / "part-2.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    (why,) = reasons(sharded)
    assert why.startswith("part-2.safetensors: ")


def test_a_shard_that_lacks_what_the_index_says_is_named(sharded):
    path = sharded / "part-0.safetensors"
    weights = load_file(path)
    lost = min(weights)
    del weights[lost]
    save_file(weights, path)
    assert reasons(sharded) == [f"part-0.safetensors lacks {lost}, which should be in it by {INDEX}"]


def test_a_damaged_index_is_named(sharded):
    (sharded / INDEX).write_text("{")
    (why,) = reasons(sharded)
    assert why.startswith(f"{INDEX} cannot be read: it is not JSON")
