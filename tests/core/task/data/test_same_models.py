"""Models whose published ``config.json`` asks for code of the directory, though transformers has their class."""

from __future__ import annotations

import json
from copy import deepcopy

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from anytron.base.errors import ConfigError
from anytron.config.imports import resolve
from anytron.config.schema import ModelSection
from anytron.task.data.model_files import SAME_MODELS, published_config, read_config
from anytron.task.data.pretrained import TOKENIZER, load_hf_config, load_tokenizer, read_hf_config
from tests.house import ROOT

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 640000,
    "torch_dtype": "bfloat16",
}
CODE = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
LATENT = {"n_routed_experts": 4, "kv_lora_rank": 16, "architectures": ["DeepseekV3ForCausalLM"]}
YARN = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0, "beta_slow": 1.0}
FIELDS = {
    # Only the class of the model can read these fields: a general one fails.
    "kimi_k2": {**SIZES, **LATENT, "max_position_embeddings": 131072, "rope_scaling": YARN},
    "mimo": {**SIZES, "head_dim": 32, "num_nextn_predict_layers": 1, "architectures": ["MiMoForCausalLM"]},
}
SORT_TOKENIZER = f"{ROOT}/examples/sort_digits.py:tokenizer"


def fields(config):
    """All of a config's fields, but for the directory that it was read from."""
    return {**config.to_dict(), "_name_or_path": ""}


@pytest.fixture
def witness(tmp_path):
    """A file that exists once the directory's code has run."""
    return tmp_path / "witness"


@pytest.fixture
def directory(tmp_path, witness):
    def make(model_type, **tokenizer):
        folder = tmp_path / model_type
        resolve(SORT_TOKENIZER, TOKENIZER)().save_pretrained(folder)
        written = {"model_type": model_type, "auto_map": CODE, **FIELDS[model_type]}
        (folder / "config.json").write_text(json.dumps(written))
        (folder / "code.py").write_text(f"open({str(witness)!r}, 'w')\n")
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | tokenizer))
        return folder

    return make


@pytest.mark.parametrize(("model_type", "known"), SAME_MODELS.items())
def test_such_a_directory_is_read_as_the_model_that_it_is(model_type, known, directory, witness):
    folder = directory(model_type)
    config = read_hf_config(folder)
    assert fields(config) == fields(AutoConfig.for_model(known, **deepcopy(FIELDS[model_type])))
    assert config.name_or_path == str(folder)
    assert fields(load_hf_config(ModelSection(path=str(folder)))) == fields(config)
    assert read_config(folder) == {"model_type": known, **FIELDS[model_type]}
    assert published_config(folder) == json.loads((folder / "config.json").read_text())
    assert not witness.exists()


@pytest.mark.parametrize("model_type", SAME_MODELS)
def test_transformers_still_refuses_it_without_that_code(model_type, directory):
    """Otherwise an entry of ``SAME_MODELS`` would hide a class of transformers."""
    assert model_type not in CONFIG_MAPPING
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoConfig.from_pretrained(directory(model_type), local_files_only=True, trust_remote_code=False)


@pytest.mark.parametrize("model_type", SAME_MODELS)
def test_what_is_saved_of_it_is_a_model_that_transformers_knows(model_type, directory, tmp_path):
    config = read_hf_config(directory(model_type))
    config.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved/config.json").read_text())
    assert saved["model_type"] == SAME_MODELS[model_type]
    assert "auto_map" not in saved
    assert saved["architectures"] == FIELDS[model_type]["architectures"]  # vLLM has a class of this name
    assert fields(AutoConfig.from_pretrained(tmp_path / "saved")) == fields(config)


@pytest.mark.parametrize("model_type", SAME_MODELS)
def test_its_tokenizer_is_the_one_of_its_files(model_type, directory):
    folder = directory(model_type)
    loaded = load_tokenizer(ModelSection(path=str(folder)))
    assert loaded.get_vocab() == resolve(SORT_TOKENIZER, TOKENIZER)().get_vocab()


def test_a_tokenizer_that_is_code_is_refused_and_a_function_may_return_it(directory, witness, tmp_path):
    """Kimi-K2's is."""
    folder = directory("kimi_k2", tokenizer_class="Words", auto_map={"AutoTokenizer": ["code.Words", None]})
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="trust_remote_code") as refused:
        load_tokenizer(ModelSection(path=str(folder)))
    assert "without code of that directory, or to 'file.py:function'" in refused.value.fix
    assert not witness.exists()
    (tmp_path / "mine.py").write_text(
        "import sys\nfrom transformers import PreTrainedTokenizer\n\n"
        "class Words(PreTrainedTokenizer):\n"
        "    vocab_size = 1\n"
        "    def get_vocab(self): return {'a': 0}\n\n"
        "def tokenizer(): return Words()\n"
    )
    made = load_tokenizer(ModelSection(path=str(folder), tokenizer=f"{tmp_path}/mine.py:tokenizer"))
    assert made.get_vocab() == {"a": 0}


def test_other_directories_are_read_as_before(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "auto_map": CODE, **SIZES}))
    assert read_config(tmp_path) == published_config(tmp_path)
    assert fields(read_hf_config(tmp_path)) == fields(AutoConfig.for_model("qwen2", **SIZES))
