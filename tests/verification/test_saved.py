"""The check of the model directory that a run writes: what was lost or changed is named."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from anytron.proof.verification.saved import compare_saved, different_fields
from anytron_conformance.tiny_models import write_tiny_model

CHECK = "saved-model"


@pytest.fixture
def directories(tmp_path):
    """A model, and a copy of it."""
    origin = write_tiny_model("qwen2_5_vl", tmp_path / "origin", num_hidden_layers=1)
    saved = tmp_path / "saved"
    shutil.copytree(origin, saved)
    return origin, saved


def change_config(directory, change):
    file = directory / "config.json"
    fields = json.loads(file.read_text())
    change(fields)
    file.write_text(json.dumps(fields))


def change_weights(directory, change):
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def test_a_copy_passes_also_in_another_dtype_and_with_other_facts_about_the_files(directories):
    origin, saved = directories
    change_weights(saved, lambda weights: {name: tensor.bfloat16() for name, tensor in weights.items()})
    change_config(saved, lambda fields: fields.update(dtype="bfloat16", transformers_version="5.0.0"))
    result = compare_saved(CHECK, origin, saved)
    assert (result.status, result.difference) == ("passed", 0)
    count = len(load_file(origin / "model.safetensors"))
    assert f"{count} of {count} tensors have the same name" in result.detail


def test_a_field_that_is_left_out_is_named_with_the_default_that_takes_its_place(directories):
    origin, saved = directories
    change_config(saved, lambda fields: fields["text_config"].pop("max_position_embeddings"))
    result = compare_saved(CHECK, origin, saved)
    assert result.status == "failed"
    assert "1 field differs" in result.detail
    assert "text_config.max_position_embeddings is 32768, and was 512" in result.detail
    assert result.fix


def test_a_changed_tensor_is_named(directories):
    origin, saved = directories
    name = "lm_head.weight"
    change_weights(saved, lambda weights: {**weights, name: weights[name] + 1})
    result = compare_saved(CHECK, origin, saved)
    assert result.status == "failed"
    assert (
        f"1 of {len(load_file(origin / 'model.safetensors'))} saved tensors differ, the first is {name}"
        in result.detail
    )
    change_weights(saved, lambda weights: {**weights, name: weights[name] * torch.nan})
    assert compare_saved(CHECK, origin, saved).status == "failed"


def test_names_and_shapes_must_not_be_others(directories):
    origin, saved = directories
    change_weights(saved, lambda weights: {**weights, "lm_head.weight": weights["lm_head.weight"].mT.contiguous()})
    result = compare_saved(CHECK, origin, saved)
    assert (result.status, result.detail) == (
        "failed",
        "the shape of the saved lm_head.weight is [64, 128], and was [128, 64]",
    )
    change_weights(saved, lambda weights: {f"other.{name}": tensor for name, tensor in weights.items()})
    result = compare_saved(CHECK, origin, saved)
    assert result.status == "failed"
    assert "has its name in the saved files" in result.detail


def test_fields_are_compared_wherever_they_are():
    before = {"a": 1, "b": {"c": [1, 2], "dtype": "float32"}, "gone": None}
    after = {"a": 1, "b": {"c": [1, 3], "dtype": "bfloat16"}, "new": {"d": True}}
    assert [*different_fields(before, after)] == [
        "b.c is [1, 3], and was [1, 2]",
        "gone is absent, and was null",
        "new.d is true, and was absent",
    ]
    assert [*different_fields(before, before)] == []
