"""Model and tokenizer directories, before any model is built and without the network."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import torch
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
)

from anytron.base.errors import ConfigError
from anytron.config.imports import resolve
from anytron.config.schema import ModelSection
from anytron.task.data.model_files import logits_fields, read_config
from anytron.task.data.pretrained import (
    SPEAKER_FILE,
    TOKENIZER,
    directory_diagnostics,
    end_token_ids,
    load_hf_config,
    load_tokenizer,
    logits_config,
    model_class,
    padding_token_id,
    save_generation_config,
    save_speakers,
    take_latent_epsilon,
)

EXAMPLES = Path(__file__).parents[4] / "examples"


@pytest.fixture
def tokenizer():
    return resolve(f"{EXAMPLES}/sort_digits.py:tokenizer", TOKENIZER)()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "there is no directory"),
        ([], r"no config\.json"),
        (["config.json"], "(?s)no weights.*model.config"),
        (["config.json", "training_args.bin"], "no weights"),
    ],
)
def test_a_directory_that_is_no_model_is_refused_at_once(tmp_path, files, message):
    if files is not None:
        (tmp_path / "m").mkdir()
        for name in files:
            (tmp_path / "m" / name).write_text("{}")
    began = time.monotonic()
    found = [str(one) for one in directory_diagnostics("model.path", tmp_path / "m", "set model.config")]
    assert re.search(message, "\n".join(found))
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("weights", ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"])
def test_weights_may_come_in_several_files(tmp_path, weights):
    for name in ("config.json", weights):
        (tmp_path / name).write_text("{}")
    assert list(directory_diagnostics("model.path", tmp_path, "")) == []


def test_a_config_that_transformers_does_not_know(tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)config is not usable.*model\.config.*no_such_model"):
        load_hf_config(ModelSection(config={"model_type": "no_such_model"}, tokenizer="t"))


def test_a_tokenizer_from_a_directory_from_the_model_and_from_a_function(tmp_path, tokenizer):
    model = tmp_path / "m"
    tokenizer.save_pretrained(model)
    for name in ("config.json", "model.safetensors"):
        (model / name).write_text('{"model_type": "qwen3"}')
    config = {"model_type": "qwen3"}
    for section in (
        ModelSection(config=config, tokenizer=str(model)),
        ModelSection(path=str(model)),
        ModelSection(config=config, tokenizer=f"{EXAMPLES}/sort_digits.py:tokenizer"),
    ):
        assert load_tokenizer(section)("31>")["input_ids"] == [3, 1, 10]


def test_a_tokenizer_that_is_none(tmp_path):
    (tmp_path / "t.py").write_text("def none():\n    return 5\n")
    (tmp_path / "empty").mkdir()
    for reference, message in (
        ("t.py:none", "(?s)tokenizer's function returned an invalid value.*int"),
        ("nowhere", "cannot be loaded"),
        ("empty", "cannot be loaded"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_tokenizer(ModelSection(config={"model_type": "qwen3"}, tokenizer=f"{tmp_path}/{reference}"))


def test_end_tokens_are_the_tokenizer_s_and_the_checkpoint_s(tmp_path, tokenizer):
    random = ModelSection(config={"model_type": "qwen3"}, tokenizer="t")
    assert end_token_ids(random, tokenizer, 16) == (tokenizer.eos_token_id,)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [14, 13]}')
    assert end_token_ids(ModelSection(path=str(tmp_path), tokenizer="t"), tokenizer, 16) == (
        tokenizer.eos_token_id,
        13,
        14,
    )
    with pytest.raises(ConfigError, match="eos_token_id is 14, but the vocabulary has 14"):
        end_token_ids(ModelSection(path=str(tmp_path), tokenizer="t"), tokenizer, 14)


def test_a_padding_token_that_the_model_has_no_row_for_is_refused_and_the_remedy_cures_it(tmp_path, tokenizer):
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(tmp_path)
    section = ModelSection(config={"model_type": "qwen3"}, tokenizer=str(tmp_path))
    assert padding_token_id(section, tokenizer, (), 17) == 16
    says = r"(?s)\[PAD\].*is 16, but the vocabulary has 16.*set pad_token in the directory's tokenizer_config\.json"
    with pytest.raises(ConfigError, match=says):
        padding_token_id(section, load_tokenizer(section), (), 16)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pad_token": "<eos>"}))
    assert padding_token_id(section, load_tokenizer(section), (), 16) == tokenizer.eos_token_id
    tokenizer.pad_token = None
    assert [padding_token_id(section, tokenizer, ends, 16) for ends in ((13, 11), ())] == [11, 0]


def test_a_trained_model_ends_its_responses_with_the_same_tokens(tmp_path, tokenizer):
    for name in ("before", "trained", "random"):
        (tmp_path / name).mkdir()
    before, trained = (ModelSection(path=str(tmp_path / name), tokenizer="t") for name in ("before", "trained"))
    (tmp_path / "before" / "generation_config.json").write_text('{"eos_token_id": [14, 13]}')
    save_generation_config(before, tmp_path / "trained")
    assert end_token_ids(trained, tokenizer, 16) == end_token_ids(before, tokenizer, 16) == (11, 13, 14)
    save_generation_config(ModelSection(config={"model_type": "qwen3"}, tokenizer="t"), tmp_path / "random")
    save_generation_config(ModelSection(path=str(tmp_path / "random"), tokenizer="t"), tmp_path / "random")
    assert list((tmp_path / "random").iterdir()) == []


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_every_norm_has_the_epsilon_of_the_config(family):
    config = AutoConfig.for_model(family, num_hidden_layers=1, rms_norm_eps=1e-3)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    take_latent_epsilon(model)
    norms = [module.variance_epsilon for module in model.modules() if hasattr(module, "variance_epsilon")]
    assert norms == [1e-3] * 5


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_of_an_omni_model_the_thinker_computes_logits(family, tmp_path):
    whole = AutoConfig.for_model(family)
    assert type(whole) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    assert model_class(whole) is AutoModelForMultimodalLM
    assert logits_config(whole) is whole.thinker_config
    assert model_class(whole.thinker_config) is AutoModelForImageTextToText
    with torch.device("meta"):
        thinker = AutoModelForImageTextToText.from_config(whole.thinker_config)
    assert type(thinker).__name__.endswith("ThinkerForConditionalGeneration")
    assert logits_config(whole.thinker_config) is whole.thinker_config

    whole.save_pretrained(tmp_path)
    fields = read_config(tmp_path)
    assert fields["model_type"] == family
    for part in ("text_config", "vision_config", "audio_config"):
        assert fields[part]["model_type"] == getattr(whole.thinker_config, part).model_type
    assert "talker_config" in fields
    assert logits_fields(fields) == fields
    assert logits_fields(fields["text_config"]) is fields["text_config"]


def test_the_voices_of_a_talker_are_copied_and_nothing_else_is(tmp_path):
    origin, saved = tmp_path / "origin", tmp_path / "saved"
    for directory in (origin, saved):
        directory.mkdir()
    section = ModelSection(path=str(origin), tokenizer="t")
    save_speakers(section, saved)
    assert list(saved.iterdir()) == []
    torch.save({"Chelsie": {"bos_token": 1}}, origin / SPEAKER_FILE)
    save_speakers(section, saved)
    assert torch.load(saved / SPEAKER_FILE, weights_only=True) == {"Chelsie": {"bos_token": 1}}
    (tmp_path / "secret").write_text("of somebody else")
    (origin / SPEAKER_FILE).unlink()
    (origin / SPEAKER_FILE).symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match="must be an archive"):
        save_speakers(section, saved)
