"""Directories that hold a language model and other models, of which the language model is read alone."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoConfig

from anytron.base.errors import ConfigError
from anytron.config.imports import resolve
from anytron.config.schema import ModelSection, RunConfig
from anytron.proof.verification.weights import stored_weights
from anytron.run.preflight import capabilities
from anytron.run.rollout.directory_model import DirectoryWeights
from anytron.task.data.composites import COMPOSITES, TensorNames, language_config
from anytron.task.data.model_files import composite, published_config, read_config, tensor_names
from anytron.task.data.pretrained import TOKENIZER, load_tokenizer, read_hf_config, save_hf_config
from anytron.task.data.vision import load_vision
from tests.house import ROOT

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
}  # fmt: skip
LATENT = {"n_routed_experts": 4, "kv_lora_rank": 16}
INNER = {
    "kimi_k25": {"model_type": "kimi_k2", **SIZES, **LATENT},
    "kimi_vl": {"model_type": "deepseek_v3", **SIZES, **LATENT, "q_lora_rank": None},
    "internvl_chat": {"model_type": "qwen2", **SIZES, "attn_implementation": "flash_attention_2"},
    "ovis2_5": {"model_type": "qwen3", **SIZES, "head_dim": 32, "torch_dtype": "float32"},
    "llavaonevision1_5": {"model_type": "LLaVAOneVision1_5_text", **SIZES, "head_dim": 32, "image_token_id": None},
}
CODE = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
NAMES = {
    "kimi_k25": ("language_model.model.layers.0.mlp.gate.weight", "language_model.lm_head.weight", "mm_projector.0.w"),
    "kimi_vl": ("language_model.model.norm.weight", "language_model.lm_head.weight", "vision_tower.blocks.0.w"),
    "internvl_chat": ("language_model.model.norm.weight", "language_model.lm_head.weight", "vision_model.layers.0.w"),
    "ovis2_5": ("llm.model.norm.weight", "llm.lm_head.weight", "visual_tokenizer.vit.layers.0.w"),
    "llavaonevision1_5": ("model.language_model.norm.weight", "lm_head.weight", "model.visual.blocks.0.w"),
}
every_type = pytest.mark.parametrize("model_type", COMPOSITES)


def whole(model_type, **fields):
    text = {**INNER[model_type], "auto_map": CODE}
    own = {"auto_map": CODE, "vision_config": {"patch_size": 14}, "torch_dtype": "bfloat16", **fields}
    return {"model_type": model_type, COMPOSITES[model_type].field: text, **own}


@pytest.fixture
def directory(tmp_path):
    def make(model_type, **fields):
        folder = tmp_path / model_type
        resolve(f"{ROOT}/examples/sort_digits.py:tokenizer", TOKENIZER)().save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(whole(model_type, **fields)))
        (folder / "code.py").write_text("raise AssertionError\n")
        weights = {name: torch.full((2,), float(n)) for n, name in enumerate(NAMES[model_type])}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder

    return make


@every_type
def test_the_config_is_that_of_the_language_model(model_type, directory):
    folder = directory(model_type)
    known = COMPOSITES[model_type].types[INNER[model_type]["model_type"]]
    taken = {
        name: value for name, value in INNER[model_type].items() if name not in ("model_type", "attn_implementation")
    }
    taken |= {"torch_dtype": "bfloat16"}  # the files'
    assert read_config(folder) == {**taken, "model_type": known}
    expected = AutoConfig.for_model(known, **deepcopy(taken))
    assert {**read_hf_config(folder).to_dict(), "_name_or_path": ""} == {**expected.to_dict(), "_name_or_path": ""}
    assert load_tokenizer(ModelSection(path=str(folder))).get_vocab()


@pytest.mark.parametrize("model_type", [name for name in COMPOSITES if name != "kimi_k25"])
def test_transformers_still_refuses_the_whole(model_type, directory):
    """Otherwise an entry would hide a class of transformers."""
    assert model_type not in CONFIG_MAPPING
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoConfig.from_pretrained(directory(model_type), local_files_only=True, trust_remote_code=False)


@pytest.mark.parametrize(
    ("outer", "inner", "tied"), [({}, {}, None), (True, {}, True), (True, False, False), (False, True, True)]
)
def test_the_language_model_says_whether_its_embeddings_are_tied_and_else_the_whole(outer, inner, tied):
    fields = whole("ovis2_5")
    fields |= {} if outer == {} else {"tie_word_embeddings": outer}
    fields["llm_config"] |= {} if inner == {} else {"tie_word_embeddings": inner}
    assert language_config(fields).get("tie_word_embeddings") is tied


@pytest.mark.parametrize("text", [None, "qwen3", {}, {"model_type": "internlm2"}, {"model_type": ["qwen3"]}])
def test_a_language_model_of_another_type_is_not_read(text):
    assert language_config({**whole("internvl_chat"), "llm_config": text}) is None


def test_nothing_is_loaded_of_a_whole_whose_language_model_is_not_read(directory):
    folder = directory("internvl_chat", llm_config={"model_type": "internlm2"})
    assert composite(folder) is None
    with pytest.raises(ConfigError):
        read_hf_config(folder)


@every_type
def test_names_in_files_and_in_the_language_model_are_each_others_inverse(model_type, directory):
    folder, (first, head, other) = directory(model_type), NAMES[model_type]
    names = tensor_names(folder)
    inner = names.inner(first)
    assert inner.startswith(("model.layers.0.", "model.norm."))
    assert names.inner(head) == "lm_head.weight"
    assert names.inner(other) is None
    assert [names.outer(names.inner(name)) for name in (first, head)] == [first, head]
    assert stored_weights(folder).keys() == {inner, "lm_head.weight"}
    with DirectoryWeights(str(folder)).open() as pieces:
        assert {piece.name for piece in pieces} == {inner, "lm_head.weight"}


def test_a_directory_of_a_language_model_alone_has_its_names(tmp_path):
    names = TensorNames()
    assert names.inner("model.norm.weight") == names.outer("model.norm.weight") == "model.norm.weight"
    assert tensor_names(tmp_path) == names
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **SIZES}))
    assert tensor_names(tmp_path) == names


@every_type
def test_what_is_saved_describes_the_whole(model_type, directory, tmp_path):
    folder = directory(model_type)
    save_hf_config(read_hf_config(folder), folder, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == published_config(folder)


def test_it_gets_no_images_and_says_so(directory):
    told = []
    model = ModelSection(path=str(directory("ovis2_5")))
    assert load_vision(model, read_hf_config(Path(model.path)), None, told.append) is None
    assert told == [f"the model gets no images: of {model.path} only the language model is read, a qwen3"]
    given = model.model_copy(update={"processor": model.path})
    with pytest.raises(ConfigError, match="only the language model is read"):
        load_vision(given, read_hf_config(Path(model.path)), None, told.append)


def test_an_engine_that_does_not_declare_it_is_refused(directory, monkeypatch):
    def found(name):
        run = RunConfig.model_validate(
            {
                "model": {"path": str(directory(name))}
                if name
                else {"config": {"model_type": "qwen3"}, "tokenizer": "t"},
                "data": {"source": "s"},
                "rewards": [{"function": "f"}],
                "rollout": {"max_new_tokens": 8},
            }
        )
        return [one for one in capabilities.training_diagnostics(run) if one.key == "model.path"]

    assert found("ovis2_5") == []
    able = capabilities.chosen_engines("megatron", "transformers")["engine.options"]
    unable = type(able)(engine=able.engine)
    monkeypatch.setattr(capabilities, "chosen_engines", lambda *_: {"engine.options": unable})
    (refused,) = found("ovis2_5")
    assert "it lacks the capability language_part" in refused.message
    assert refused.fix == "set engine.name=megatron"
    assert found(None) == []


def test_the_talker_of_an_omni_model_is_another_model(tmp_path):
    fields = {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": SIZES}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    thinker, others = "thinker.lm_head.weight", ["talker.model.norm.weight", "code2wav.x", "token2wav.x"]
    names = tensor_names(tmp_path)
    assert composite(tmp_path) is None
    assert names.inner(thinker) == names.outer(thinker) == thinker
    assert [names.inner(name) for name in others] == [None] * 3
    assert TensorNames().inner(others[0]) == others[0]
