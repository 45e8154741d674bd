"""Weights arrive complete and bit for bit, or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from anytron.base.errors import EngineError
from anytron.workers.engines.rollout_engine import PromptInputs, SamplingParams
from anytron.workers.weights.transfer import Piece
from anytron_conformance.tiny_models import CONFIGS, write_tiny_model
from anytron_rollout import weights as loading
from tests.backends.megatron.families.published import PUBLISHED, write_published_model
from tests.backends.rollout.conftest import generate

SAMPLING = SamplingParams(max_new_tokens=6, top_k=1)
PROMPT = [PromptInputs((1, 10))]
NORM = "model.norm.weight"


def test_new_weights_change_what_is_generated(engine, reference, write):
    ((before,),) = generate(engine, PROMPT, SAMPLING, seed=0)
    with torch.no_grad():
        reference.lm_head.weight.neg_()
    manifest = replace(write(reference.state_dict()), version=9)
    assert engine.load_weights(manifest) == 9
    ((after,),) = generate(engine, PROMPT, SAMPLING, seed=0)
    assert after.tokens != before.tokens


def test_a_damaged_file_is_refused(engine, reference, write):
    manifest = write(reference.state_dict())
    weights = load_file(manifest.path)
    weights[NORM].view(torch.int32)[3] ^= 1  # one bit
    save_file(weights, manifest.path)
    with pytest.raises(EngineError, match=f"(?s)damaged in transfer.*{NORM}.*crc32"):
        engine.load_weights(manifest)
    with pytest.raises(EngineError, match="no weights yet"):
        generate(engine, PROMPT, SAMPLING, seed=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop(NORM), "(?s)is missing.*model.norm.weight"),
        (lambda weights: weights.update(extra=torch.ones(2)), "(?s)unknown to the model.*extra"),
        (lambda weights: weights.update({NORM: torch.ones(3)}), r"(?s)wrong shape.*\(3,\), but .* model has \(32,\)"),
    ],
)
def test_a_tensor_missing_unknown_or_of_another_shape_is_refused(engine, reference, write, change, message):
    weights = dict(reference.state_dict())
    change(weights)
    with pytest.raises(EngineError, match=message):
        engine.load_weights(write(weights))


def test_modules_for_speculative_decoding_are_left_out_if_they_are_declared_and_only_then(engine, reference, write):
    weights = {**reference.state_dict(), "model.layers.9.eh_proj.weight": torch.ones(2, 4)}
    declared = replace(write(weights), optional=frozenset({"model.layers.9.eh_proj.weight"}))
    assert engine.load_weights(replace(declared, version=4)) == 4
    with pytest.raises(EngineError, match=r"(?s)unknown to the model.*layers\.9"):
        engine.load_weights(write(weights))


def test_a_tensor_that_the_model_has_is_loaded_also_if_it_is_called_optional(engine, reference, write):
    weights = {**reference.state_dict(), NORM: torch.full((32,), 3.0)}
    engine.load_weights(replace(write(weights), optional=frozenset({NORM})))
    assert torch.equal(engine._model.state_dict()[NORM], weights[NORM])
    del weights[NORM]
    with pytest.raises(EngineError, match=f"(?s)manifest do not list the same weights.*{NORM}"):
        engine.load_weights(replace(write(weights), optional=frozenset({NORM})))


def test_a_file_that_does_not_fit_its_manifest_is_refused(engine, reference, write):
    manifest = write(reference.state_dict())
    checksums = {name: crc for name, crc in manifest.checksums.items() if name != NORM}
    with pytest.raises(EngineError, match=f"(?s)manifest do not list the same weights.*{NORM}"):
        engine.load_weights(replace(manifest, checksums=checksums))


def test_bfloat16_weights_are_bit_equal_and_float32_ones_are_rounded(new_engine, reference, write):
    config = reference.config.to_dict() | {"model_type": "qwen3"}
    engine = new_engine(model={"config": config, "dtype": "bfloat16"})
    exact = {name: tensor.bfloat16() for name, tensor in reference.state_dict().items()}
    for weights in (exact, reference.state_dict()):
        engine.load_weights(write(weights))
        loaded = engine._model.state_dict()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in exact.items())


def test_tied_embeddings_come_under_one_name_or_under_both(new_engine, reference, write):
    config = reference.config.to_dict() | {"model_type": "qwen3", "tie_word_embeddings": True}
    weights = dict(reference.state_dict())
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    one = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    for complete in (weights, one):
        engine = new_engine(model={"config": config, "dtype": "float32"})
        engine.load_weights(write(complete))
        assert torch.equal(engine._model.lm_head.weight, weights["model.embed_tokens.weight"])

    weights["lm_head.weight"] = weights["lm_head.weight"] + 1
    with pytest.raises(EngineError, match="they are tied"):
        new_engine(model={"config": config, "dtype": "float32"}).load_weights(write(weights))


def test_weights_that_differ_by_a_bit_are_named_and_so_are_those_of_one_side(engine, reference, write):
    weights = dict(reference.state_dict())
    engine.load_weights(write(weights))
    assert engine.differing_weights(write(weights)) == []
    assert engine.differing_weights(write({name: part.double() for name, part in weights.items()})) == []
    held = engine._model.state_dict()
    held[NORM].view(torch.int32)[3] ^= 1
    assert engine.differing_weights(write(weights)) == [NORM]
    held[NORM].view(torch.int32)[3] ^= 1
    others = {**weights, NORM: torch.ones(3), "extra": torch.ones(2), "left_out": torch.ones(2)}
    del others["lm_head.weight"]
    manifest = replace(write(others), optional=frozenset({"left_out"}))
    assert sorted(engine.differing_weights(manifest)) == ["extra", "lm_head.weight", NORM]


def test_a_saboteur_who_loads_all_weights_but_one_is_noticed(engine, reference, write, monkeypatch):
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(1)
    real = loading._fill
    monkeypatch.setattr(loading, "_fill", lambda target, piece: piece.name == NORM or real(target, piece))
    manifest = write(reference.state_dict())
    engine.load_weights(manifest)
    assert engine.differing_weights(manifest) == [NORM]


def test_a_file_that_is_not_there_is_refused(engine, reference, write):
    manifest = write(reference.state_dict())
    Path(manifest.path).unlink()
    with pytest.raises(EngineError, match="cannot be read"):
        engine.load_weights(manifest)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_a_vision_language_model_takes_the_names_of_its_checkpoint_and_of_its_modules(
    new_engine, write, tmp_path, family
):
    published = load_file(write_tiny_model(family, tmp_path) / "model.safetensors")
    engine = new_engine(model={"config": CONFIGS[family], "dtype": "float32"})
    blank = {name: tensor.clone() for name, tensor in engine._model.state_dict().items()}
    engine.load_weights(write(published))
    loaded = {name: tensor.clone() for name, tensor in engine._model.state_dict().items()}
    values = sorted(tensor.double().sum().item() for tensor in published.values())
    assert sorted(tensor.double().sum().item() for tensor in loaded.values()) == values
    assert (loaded.keys() == published.keys()) == (family != "qwen2_5_vl")

    engine.load_weights(write(blank))
    engine.load_weights(write(loaded))
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in engine._model.state_dict().items())

    lost = next(name for name in published if "visual" in name)
    with pytest.raises(EngineError, match=r"(?s)is missing.*visual"):
        engine.load_weights(write({name: tensor for name, tensor in published.items() if name != lost}))
    with pytest.raises(EngineError, match=r"(?s)unknown to the model.*visual\.extra"):
        engine.load_weights(write(published | {"visual.extra": torch.ones(2)}))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_experts_come_one_by_one_as_they_are_published_and_go_into_one_tensor(new_engine, write, tmp_path, family):
    directory = write_tiny_model(family, tmp_path)
    published = load_file(directory / "model.safetensors")
    engine = new_engine(model={"config": CONFIGS[family], "dtype": "float32"})
    engine.load_weights(write(published))
    expected = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()
    assert expected.keys() != published.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in engine._model.state_dict().items())

    lost = next(name for name in published if "experts.2.up_proj" in name)
    with pytest.raises(EngineError, match=r"(?s)is missing.*mlp\.experts\.gate_up_proj"):
        engine.load_weights(write({name: tensor for name, tensor in published.items() if name != lost}))
    with pytest.raises(EngineError, match=r"(?s)unknown to the model.*experts\.4\.up_proj"):
        engine.load_weights(write(published | {lost.replace("experts.2", "experts.4"): published[lost]}))
    with pytest.raises(EngineError, match=r"(?s)wrong shape.*experts\.2\.up_proj"):
        engine.load_weights(write(published | {lost: published[lost].t()}))


def test_experts_that_were_published_transposed_are_turned(new_engine, write, tmp_path):
    directory = write_published_model("qwen3_vl_moe", tmp_path)
    published = load_file(directory / "model.safetensors")
    engine = new_engine(model={"config": PUBLISHED["qwen3_vl_moe"], "dtype": "float32"})
    engine.load_weights(write(published))
    expected = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).state_dict()
    loaded = engine._model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())
    turned = [name for name in published if published[name].shape != loaded[name].shape]
    assert len(turned) == 8
    assert engine.differing_weights(write(published)) == []
    loaded[turned[0]].view(torch.int32)[1, 2, 3] ^= 1
    assert engine.differing_weights(write(published)) == [turned[0]]
    with pytest.raises(EngineError, match=r"(?s)wrong shape.*mlp\.experts\."):  # as transformers would save it
        engine.load_weights(write(expected))


@pytest.mark.parametrize("size", [1, 5, 12, 17, 60])
def test_a_transposed_tensor_comes_in_pieces_of_any_size(size):
    values = torch.arange(60.0)
    target = torch.zeros(5, 4, 3)
    for start in range(0, 60, size):
        piece = Piece("experts", (5, 3, 4), start, values[start : start + size], optional=False)
        loading._fill(target.mT, piece)
        assert loading._holds(target.mT, piece)
    assert torch.equal(target, values.view(5, 3, 4).mT)
    target[4, 3, 2] += 1
    assert not loading._holds(target.mT, Piece("experts", (5, 3, 4), 0, values, optional=False))
