"""A model made from ``model.config``: a complete directory, of the right class, and the same every time."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from anytron.base.errors import ConfigError
from anytron.config.imports import resolve
from anytron.run.trainer.models import model_directory, write_random_model
from anytron.task.data.pretrained import TOKENIZER, model_class
from anytron_conformance.tiny_models import CONFIGS


@pytest.mark.parametrize(
    ("family", "sees"), [("qwen2_5_vl", True), ("qwen3_vl", True), ("qwen3_5", True), ("qwen3", False)]
)
def test_a_random_model_of_a_family_loads_as_what_it_is(new_run, tmp_path, family, sees):
    files = []
    for seed in (3, 3, 4):
        output = tmp_path / str(len(files))
        run = new_run(model={"config": CONFIGS[family]}, trainer={"seed": seed, "output_dir": str(output)})
        tokenizer = resolve(run.config.model.tokenizer, TOKENIZER)()
        write_random_model(run.config, tokenizer)
        files.append(load_file(model_directory(run.config) / "model.safetensors"))
    first, again, other = files
    assert all(first[name].equal(tensor) for name, tensor in again.items())
    assert not all(first[name].equal(tensor) for name, tensor in other.items())
    chosen = model_class(AutoConfig.from_pretrained(model_directory(run.config)))
    assert chosen is (AutoModelForImageTextToText if sees else AutoModelForCausalLM)
    loaded = chosen.from_pretrained(model_directory(run.config))
    assert hasattr(loaded.model, "visual") == sees


def test_the_padding_token_has_an_embedding_like_all_others(new_run, tmp_path):
    run = new_run(model={"config": CONFIGS["qwen3"]}, trainer={"output_dir": str(tmp_path)})
    write_random_model(run.config, resolve(run.config.model.tokenizer, TOKENIZER)())
    weights = load_file(model_directory(run.config) / "model.safetensors")
    torch.manual_seed(run.config.trainer.seed)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS["qwen3"])).state_dict()
    embedding = "model.embed_tokens.weight"
    padding = CONFIGS["qwen3"]["pad_token_id"]
    assert theirs[embedding][padding].norm() == 0
    norms = weights[embedding].norm(dim=1)
    assert 0.5 < norms[padding] / norms.mean() < 2
    theirs[embedding][padding] = weights[embedding][padding]
    assert all(tensor.equal(theirs[name]) for name, tensor in weights.items())


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3"])
def test_a_tokenizer_that_is_larger_than_the_model_is_refused(new_run, family):
    fields = dict(CONFIGS[family])
    if family == "qwen3":
        fields["vocab_size"] = 15
    else:
        fields["text_config"] = {**fields["text_config"], "vocab_size": 15}
    run = new_run(model={"config": fields})
    with pytest.raises(ConfigError, match=r"(?s)more tokens than the model.*16 tokens, but vocab_size is 15"):
        write_random_model(run.config, resolve(run.config.model.tokenizer, TOKENIZER)())
