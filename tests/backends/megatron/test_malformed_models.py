"""Malformed model directories: each is refused in words, or trains; none hangs or leaves a traceback.

Everything that reads a directory before an engine is built runs here: the checks of the core and of Megatron, and the
loading of config, tokenizer and prompts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from pathlib import Path

import pytest

from anytron.base.errors import AnytronError
from anytron.config.diagnostics import refuse
from anytron.config.imports import resolve
from anytron.run.preflight.open_run import open_run
from anytron.run.preflight.prepare import prepare
from anytron.task.data.model_files import faults
from anytron.task.data.pretrained import TOKENIZER
from anytron.task.isolation import reader
from anytron_conformance.tiny_models import write_tiny_model
from anytron_megatron.models.families import FAMILIES

EXAMPLES = Path(__file__).parents[3] / "examples"
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
TOO_DEEP = b"[" * 100_000


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A directory that trains, and the run that trains it."""
    folder = tmp_path_factory.mktemp("sound")
    write_tiny_model("qwen3", folder / "model", num_hidden_layers=2)
    tokenizer = resolve(f"{EXAMPLES}/sort_digits.py:tokenizer", TOKENIZER)()
    tokenizer.save_pretrained(folder / "model")
    (folder / "run.yaml").write_text(
        f"model: {{path: model, dtype: float32}}\n"
        f"data: {{source: {EXAMPLES}/sort_digits.py:prompts, options: {{count: 4, digits: 4}}, prompts_per_step: 4}}\n"
        f"rewards: [{{function: {EXAMPLES}/sort_digits.py:reward}}]\n"
        f"rollout: {{samples_per_prompt: 2, max_new_tokens: 4}}\n"
        f"trainer: {{output_dir: run}}\n"
    )
    return folder


@pytest.fixture
def folder(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "copy")


def start(folder, given=()):
    """All that a run reads before its first worker."""
    run = open_run(folder / "run.yaml", [f"trainer.output_dir={folder / 'run'}", *given])
    refuse(run.diagnostics)
    return prepare(run.config)


def put(name, content):
    """Replace a file."""

    def change(model):
        (model / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())

    return change


def fields(name=CONFIG, **changes):
    """Change fields of a JSON file."""

    def change(model):
        (model / name).write_text(json.dumps({**json.loads((model / name).read_text()), **changes}))

    return change


def text(name, value):
    """A field whose value ``json`` would not write."""

    def change(model):
        read = (model / CONFIG).read_text()
        (model / CONFIG).write_text(f'{{"{name}": {value}, {read.lstrip().lstrip("{")}')

    return change


def header(change_header):
    """Change the header of the weights; the data stay."""

    def change(model):
        data = (model / WEIGHTS).read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        new = change_header(json.loads(data[8 : 8 + length]))
        new = new if isinstance(new, bytes) else json.dumps(new).encode()
        (model / WEIGHTS).write_bytes(struct.pack("<Q", len(new)) + new + data[8 + length :])

    return change


def first(name, value):
    """Change a part of the first tensor's entry in a header."""

    def change(entries):
        tensor = next(name for name in entries if name != "__metadata__")
        return {**entries, tensor: {**entries[tensor], name: value}}

    return header(change)


def index(names):
    """An index over the sound weights, whose file names go through a function."""

    def change(model):
        data = (model / WEIGHTS).read_bytes()
        tensors = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
        mapping = {tensor: names(model) for tensor in tensors if tensor != "__metadata__"}
        (model / INDEX).write_text(json.dumps({"weight_map": mapping}))

    return change


def pipe(name):
    """A pipe, which whoever opens it waits for."""

    def change(model):
        (model / name).unlink(missing_ok=True)
        os.mkfifo(model / name)

    return change


def link(name, target):
    def change(model):
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to(target)

    return change


def tokenizer(**parts):
    """Parts of ``tokenizer.json``."""
    return fields("tokenizer.json", **parts)


def doubled(times):
    return {"type": "Sequence", "normalizers": [REPLACE] * times}


REPLACE = {"type": "Replace", "pattern": {"String": "1"}, "content": "11"}
DECODER = {"type": "Sequence", "decoders": [REPLACE] * 40}
MISSING = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {},
}
MANY = {
    **MISSING,
    "single": [{"SpecialToken": {"id": "<eos>", "type_id": 0}}] * 200_000,
    "special_tokens": {"<eos>": {"id": "<eos>", "ids": [11] * 1000, "tokens": ["<eos>"] * 1000}},
}
CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": "//////////8="}
BAD_MERGES = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}

CASES = {
    # bombs, each of a few kilobytes but the last
    "a normaliser doubles its text 40 times": (tokenizer(normalizer=doubled(40)), "model directory cannot be loaded"),
    "a decoder doubles its text 40 times": (tokenizer(decoder=DECODER), "model directory cannot be loaded"),
    "a post-processor names no token": (
        tokenizer(post_processor=MISSING),
        "model directory cannot be loaded|tokenizer",
    ),
    "a post-processor of 200,000 entries": (
        tokenizer(post_processor=MANY),
        "model directory cannot be loaded|tokenizer",
    ),
    "a character map of garbage": (tokenizer(normalizer=CHARSMAP), "model directory cannot be loaded|tokenizer"),
    "a prefix longer than a merge": (
        tokenizer(model={**BAD_MERGES, "continuing_subword_prefix": "abcdef"}),
        "model directory cannot be loaded|tokenizer",
    ),
    "a tokenizer of 300 MB": (put("tokenizer.json", b" " * (300 << 20)), "has more than 134217728 bytes"),
    "weights are a link to themselves": (link(WEIGHTS, WEIGHTS), "is neither a file nor a link to one"),
    "2,000,000 labels": (
        put(CONFIG, b'{"id2label": {' + b",".join(b'"%d": "a"' % number for number in range(2_000_000)) + b"}}"),
        "has more than 8388608 bytes",
    ),
    # config.json as a file
    "config is a list": (put(CONFIG, []), r"config\.json.*it is of type list, not an object"),
    "config is null": (put(CONFIG, None), r"config\.json.*of type NoneType"),
    "config is a number": (put(CONFIG, 5), r"config\.json.*of type int"),
    "config is text": (put(CONFIG, "text"), r"config\.json.*of type str"),
    "config is empty": (put(CONFIG, b""), r"config\.json.*not JSON"),
    "config is cut short": (put(CONFIG, b'{"model_type": "qwen3", '), r"config\.json.*not JSON"),
    "config is not UTF-8": (put(CONFIG, b'{"model_type": "\xff\xfe"}'), r"config\.json.*not JSON.*utf-8"),
    "config is UTF-16": (put(CONFIG, '{"model_type": "qwen3"}'.encode("utf-16")), r"config\.json.*not JSON"),
    "config has a byte order mark": (put(CONFIG, b'\xef\xbb\xbf{"model_type": "qwen3"}'), r"config\.json.*not JSON"),
    "config is nested 100 000 times": (put(CONFIG, TOO_DEEP), r"config\.json.*nested too deeply"),
    "config is nested 50 times": (put(CONFIG, b'{"a":' * 50 + b"1" + b"}" * 50), r"config\.json.*more than 32 levels"),
    "config has a number of 5000 digits": (text("x", "9" * 5000), r"config\.json.*not JSON"),
    "config is a directory": (
        lambda model: ((model / CONFIG).unlink(), (model / CONFIG).mkdir()),
        "has no config.json",
    ),
    "config is a pipe": (pipe(CONFIG), "is neither a file nor a link to one"),
    "config is a link to nowhere": (link(CONFIG, "nowhere"), "is neither a file nor a link to one"),
    "config is a link to a device": (link(CONFIG, "/dev/zero"), "is neither a file nor a link to one"),
    # fields of config.json
    "no model_type": (put(CONFIG, {}), "Should have a `model_type`"),
    "model_type is a number": (fields(model_type=7), r"config\.json: model_type: it must be a string"),
    "model_type is a list": (fields(model_type=["qwen3"]), r"model_type: it must be a string"),
    "model_type is unknown": (fields(model_type="qwen33"), "did you mean qwen3"),
    "layers are text": (fields(num_hidden_layers="2"), r"num_hidden_layers: it must be a whole number.*is '2'"),
    "layers are 2.5": (fields(num_hidden_layers=2.5), "num_hidden_layers: it must be a whole number"),
    "layers are true": (fields(num_hidden_layers=True), "num_hidden_layers: it must be a whole number"),
    "layers are a list": (fields(num_hidden_layers=[2]), "num_hidden_layers: it must be a whole number"),
    "layers are null": (fields(num_hidden_layers=None), ""),
    "no layers": (fields(num_hidden_layers=0), "num_hidden_layers: it must be a whole number from 1 to 4096"),
    "-1 layers": (fields(num_hidden_layers=-1), "num_hidden_layers: it must be a whole number from 1"),
    "1e6 layers": (fields(num_hidden_layers=10**6), "num_hidden_layers: it must be .*is 1000000"),
    "1e9 layers": (fields(num_hidden_layers=10**9), "num_hidden_layers: it must be .*is 1000000000"),
    "layers of 3000 digits": (text("x", "9" * 3000), ""),
    "1e9 labels": (fields(num_labels=10**9), "num_labels: it must be a whole number from 0 to 65536"),
    "heads are 0": (fields(num_attention_heads=0), "num_attention_heads: it must be a whole number from 1"),
    "heads are text": (fields(num_attention_heads="4"), "num_attention_heads: it must be"),
    "key heads are 0": (fields(num_key_value_heads=0), "num_key_value_heads: it must be"),
    "head_dim is text": (fields(head_dim="16"), "head_dim: it must be"),
    "hidden_size is 1e30": (fields(hidden_size=10**30), r"hidden_size: it must be .*100 bits long"),
    "hidden_size is infinite": (text("hidden_size", "1e999"), ""),  # the later, sound entry wins
    "vocab_size is text": (fields(vocab_size="128"), "vocab_size: it must be"),
    "vocab_size is negative": (fields(vocab_size=-5), "vocab_size: it must be"),
    "vocab_size of another model": (fields(vocab_size=64), "tensors have a different shape"),
    "context is text": (fields(max_position_embeddings="long"), "max_position_embeddings: it must be"),
    "context is a list": (fields(max_position_embeddings=[1]), "max_position_embeddings: it must be"),
    "text_config is null": (fields(text_config=None), ""),
    "text_config is a list": (fields(text_config=[]), "text_config: it must be an object"),
    "vision_config is text": (fields(vision_config="x"), "vision_config: it must be an object"),
    "rope_parameters is a list": (fields(rope_parameters=[1]), "rope_parameters: it must be an object"),
    "rope_type is a list": (fields(rope_parameters={"rope_type": []}), r"rope_parameters\.rope_type: it must be a str"),
    "rope factor is NaN": (fields(rope_parameters={"rope_type": "linear", "factor": float("nan")}), "finite number"),
    "rope_theta is text": (fields(rope_parameters={"rope_theta": "1e6"}), r"rope_parameters\.rope_theta: .*finite"),
    "eps is text": (fields(rms_norm_eps="small"), "rms_norm_eps: it must be a finite number"),
    "tie_word_embeddings is text": (fields(tie_word_embeddings="no"), "tie_word_embeddings: it must be true or false"),
    "layer_types is a number": (fields(layer_types=3), "layer_types: it must be a list"),
    "layer_types has numbers": (fields(layer_types=[1, 2]), "layer_types: it must be a list, each entry a string"),
    "layer_types are too many": (fields(layer_types=["full_attention"] * 9), ""),
    "architectures is text": (fields(architectures="Qwen3ForCausalLM"), "architectures: it must be a list"),
    "auto_map is a list": (fields(auto_map=["AutoConfig"]), "auto_map: it must be an object"),
    "dtype is a number": (fields(dtype=5), ""),
    "a kernel of the network computes attention": (fields(_attn_implementation="owner/repo"), None),
    "a kernel of the network computes experts": (fields(_experts_implementation="owner/repo"), None),
    "quantization is text": (fields(quantization_config="fp4"), ""),
    # weights
    "weights are empty": (put(WEIGHTS, b""), r"model\.safetensors: the file has 0 bytes"),
    "weights are cut short": (lambda model: os.truncate(model / WEIGHTS, 5000), r"model\.safetensors"),
    "header is longer than the file": (
        put(WEIGHTS, struct.pack("<Q", 2**62) + b"{}"),
        "cut short, or not a safetensors file",
    ),
    "header of 100 000 brackets": (header(lambda _: TOO_DEEP), r"model\.safetensors.*nested too deeply"),
    "header is a list": (header(lambda _: []), r"model\.safetensors: its header cannot be read"),
    "header is not UTF-8": (header(lambda _: b'{"\xff": 1}'), r"its header cannot be read"),
    "an entry is a number": (header(lambda entries: {**entries, "a": 5}), "its header cannot be read"),
    "a shape is a number": (first("shape", 5), "its header cannot be read.*5 is not a list of sizes"),
    "a shape is negative": (first("shape", [-1, 2]), "is not a list of sizes"),
    "a shape has text": (first("shape", ["1"]), "is not a list of sizes"),
    "a shape is another": (first("shape", [1, 2]), "1 of .* tensors have a different shape"),
    "offsets are text": (first("data_offsets", ["0", "9"]), "is not a list of sizes"),
    "offsets are one": (first("data_offsets", [0]), "its header cannot be read"),
    "offsets lie behind the end": (first("data_offsets", [0, 10**12]), "its header requires"),
    "weights are a pipe": (pipe(WEIGHTS), "is neither a file nor a link to one"),
    # index
    "index is a list": (put(INDEX, []), r"index\.json cannot be read: it is of type list"),
    "index has no map": (put(INDEX, {}), r"index\.json cannot be read.*weight_map"),
    "index maps to a number": (
        put(INDEX, {"weight_map": {"a": 5}}),
        r"index\.json cannot be read.*does not map each tensor to a file",
    ),
    "index maps to a list": (
        put(INDEX, {"weight_map": {"a": []}}),
        r"index\.json cannot be read.*does not map each tensor to a file",
    ),
    "index maps to nothing": (put(INDEX, {"weight_map": {}}), ""),
    "index is nested": (put(INDEX, TOO_DEEP), r"index\.json cannot be read: it is nested too deeply"),
    "index leads up": (index(lambda _: "../sound/model.safetensors"), "is not a plain file name"),
    "index is absolute": (index(lambda model: str(model / WEIGHTS)), "is not a plain file name"),
    "index names the directory above": (index(lambda _: ".."), "is not a plain file name|are missing"),
    "index names a NUL": (index(lambda _: "a\0b"), "is not a plain file name"),
    "index names itself": (index(lambda _: INDEX), r"index\.json: the file has \d+ bytes, but its beginning says"),
    "index of the sound file": (index(lambda _: WEIGHTS), None),
    # what else lies there
    "generation config is cut short": (put(GENERATION, b"{"), r"generation_config\.json.*not JSON"),
    "generation config is a list": (put(GENERATION, [2]), r"generation_config\.json.*of type list"),
    "end token is text": (put(GENERATION, {"eos_token_id": "2"}), r"generation_config\.json: eos_token_id: it must be"),
    "end token is negative": (put(GENERATION, {"eos_token_id": [2, -3]}), "eos_token_id: it must be a list"),
    "end token is out of the vocabulary": (put(GENERATION, {"eos_token_id": 5000}), "eos_token_id is 5000, but"),
    "tokenizer is cut short": (put("tokenizer.json", b"{"), "The tokenizer cannot be loaded"),
    "tokenizer is a list": (put("tokenizer.json", []), "The tokenizer cannot be loaded"),
    "tokenizer is nested": (put("tokenizer.json", TOO_DEEP), "The tokenizer cannot be loaded"),
    "tokenizer is a pipe": (pipe("tokenizer.json"), "is neither a file nor a link to one"),
    "tokenizer config is a list": (put("tokenizer_config.json", []), r"tokenizer_config\.json.*of type list"),
    "tokenizer class is a number": (put("tokenizer_config.json", {"tokenizer_class": 5}), ""),
    "tokenizer class is another": (put("tokenizer_config.json", {"tokenizer_class": "T5Tokenizer"}), ""),
    "tokenizer makes 1e9 tokens": (
        put("tokenizer_config.json", {"tokenizer_class": "T5Tokenizer", "extra_ids": 10**9}),
        "extra_ids: it must be a whole number from 0 to 65536",
    ),
    "special tokens are a number": (put("special_tokens_map.json", 5), ""),
}


def refusal(folder):
    """The error, or None: anything else than one of ours is raised."""
    try:
        start(folder)
    except AnytronError as error:
        return error


@pytest.fixture
def impatient(monkeypatch):
    """Of what computes without end, a second shows as much as six."""
    monkeypatch.setattr(reader, "COMPUTE_S", 1.0)


@pytest.mark.some(8)
@pytest.mark.usefixtures("impatient")
@pytest.mark.timeout(60)  # on a busy machine; the hangs that were seen took minutes and gigabytes
@pytest.mark.parametrize(("change", "says"), CASES.values(), ids=CASES)
def test_a_malformed_directory_is_refused_in_words_or_trains(folder, change, says):
    """``says``: part of the error; None = it trains; empty = either."""
    change(folder / "model")
    error = refusal(folder)
    if error is None:
        assert not says
    else:
        assert says is not None, error
        assert error.what
        assert error.where or error.why.count("\n") > 1  # several mistakes, each with its own place
        assert re.search(f"(?s){says}", str(error)), error


def test_no_family_has_a_default_config_that_would_be_refused():
    from transformers import CONFIG_MAPPING

    known = [family for family in FAMILIES if family in CONFIG_MAPPING]
    assert len(known) > 30
    for family in known:
        fields = json.loads(CONFIG_MAPPING[family]().to_json_string(use_diff=False))
        assert list(faults(fields)) == [], family
