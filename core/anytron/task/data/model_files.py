"""Read the JSON files of a model directory, and check every field that is used.

A model directory is not trusted. Every field that Anytron, Megatron or mcore-bridge computes with
is checked once, here, for its type and its size, so that no later code has to. An error names the file and the field.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron.base.errors import ConfigError
from anytron.config import json_files
from anytron.config.diagnostics import Diagnostic
from anytron.config.json_files import LARGEST_FILE
from anytron.task.data.composites import COMPOSITES, TensorNames, language_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from anytron.task.data.composites import Composite

    Kind = Callable[[Any], str]
    """Function that returns what a value must be; empty if the value is accepted."""

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of transformers' image processors; the last, for videos, is part of the same processor and copied with it."""

SAME_MODELS: Mapping[str, str] = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""Values of ``model_type`` that ask for code of the model directory -> the same model's type in transformers.

Kimi-K2 has the layers and tensors of DeepSeek-V3 (deploy guide of moonshotai/Kimi-K2-Instruct), and MiMo-7B those of
Qwen2 (XiaomiMiMo/MiMo-7B-RL, ``modeling_mimo.py``), with prediction modules besides."""

THINKER = "thinker_config"
"""The part of an Omni model's config that computes logits; the others belong to the talker, which speaks."""
IDLE = ("talker.", "token2wav.", "code2wav.")
"""Beginnings of the names of these other parts' tensors in files: they are neither built nor trained, and are kept."""

LARGEST_CONFIG = 8 * 2**20
"""Most bytes of one of :data:`FILES`; the largest published ones, with names of 20,000 labels, have a tenth."""
LARGEST_TOKENIZER = 128 * 2**20
"""Most bytes of a file of a tokenizer; the largest published ones have a quarter of it."""
TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "added_tokens", "special_tokens", "chat_template", "sentencepiece")
"""Beginnings of the names of a tokenizer's files."""
MOST_EXPERTS = 2**18
"""Most experts of all layers together; the largest published models have a tenth of it."""

EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""Fields that count a layer's experts, of which a ``config.json`` has one (as mcore_bridge/config/parser.py reads)."""
CHOSEN_EXPERTS = (
    "num_experts_per_tok",
    "experts_per_token",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "top_k_experts",
)
"""Fields that say how many of a layer's experts process a token, of which a ``config.json`` has one."""


def has_experts(text: Mapping[str, Any]) -> bool:
    """Return whether a language model has experts, from the fields of its ``config.json``."""
    return any(text.get(name) for name in EXPERT_COUNTS)


def whole(value: Any, *, low: int, high: int) -> str:
    """Return "" for an integer within bounds (not ``True`` or ``2.0``), else what the value must be."""
    return "" if type(value) is int and low <= value <= high else f"a whole number from {low} to {high}"


def number(value: Any) -> str:
    """Return "" for a finite number, else what the value must be."""
    return "" if type(value) in (int, float) and math.isfinite(value) else "a finite number"


def flag(value: Any) -> str:
    """Return "" for true and false, else what the value must be."""
    return "" if isinstance(value, bool) else "true or false"


def text(value: Any) -> str:
    """Return "" for a string of ASCII characters, else what the value must be."""
    return "" if isinstance(value, str) and value.isascii() else "a string of ASCII characters"


def mapping(value: Any) -> str:
    """Return "" for a JSON object, else what the value must be."""
    return "" if isinstance(value, dict) else "an object"


def list_of(value: Any, *, kind: Kind) -> str:
    """Return "" for a list whose entries ``kind`` accepts, else what the value must be."""
    if not isinstance(value, list):
        return f"a list, each entry {kind(None)}"
    return next((f"a list, each entry {wanted}" for one in value if (wanted := kind(one))), "")


def one_or_list(value: Any, *, kind: Kind) -> str:
    """Return "" if ``kind`` accepts the value or, for a list, each of its entries; else what the value must be."""
    return list_of(value, kind=kind) if isinstance(value, list) else kind(value)


def _up_to(high: int) -> Kind:
    return partial(whole, low=1, high=high)


def _from_zero_to(high: int) -> Kind:
    return partial(whole, low=0, high=high)


def _fields(*kinds: tuple[Kind, str]) -> dict[str, Kind]:
    return {name: kind for kind, names in kinds for name in names.split()}


_TOKEN = _from_zero_to(2**31 - 1)

_CONFIG = _fields(
    (text, "model_type scoring_func topk_method rope_type"),
    # transformers makes a list of one entry per layer or label as soon as it reads the number.
    (_up_to(4096), "num_hidden_layers num_layers n_layers n_layer depth"),
    (_from_zero_to(2**16), "num_labels num_nextn_predict_layers n_group topk_group"),
    (_from_zero_to(2**16), " ".join((*EXPERT_COUNTS, *CHOSEN_EXPERTS, "n_shared_experts"))),
    (_up_to(2**31 - 1), "hidden_size intermediate_size vocab_size max_position_embeddings out_hidden_size"),
    (_up_to(2**16), "num_attention_heads num_key_value_heads num_heads linear_num_key_heads"),
    (_up_to(2**16), "linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim"),
    (_up_to(2**16), "decoder_sparse_step full_attention_interval temporal_patch_size spatial_merge_size"),
    (partial(one_or_list, kind=_up_to(2**16)), "patch_size"),
    (_from_zero_to(2**16), "head_dim"),
    (_from_zero_to(2**31 - 1), "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank"),
    (_from_zero_to(2**31 - 1), "qk_nope_head_dim qk_rope_head_dim v_head_dim sliding_window first_k_dense_replace"),
    (number, "rms_norm_eps rope_theta partial_rotary_factor routed_scaling_factor attention_dropout factor"),
    (flag, "tie_word_embeddings attention_bias mlp_bias norm_topk_prob"),
    (_TOKEN, "image_token_id video_token_id"),
    (partial(list_of, kind=text), "layer_types architectures"),
    (partial(list_of, kind=_from_zero_to(2**16)), "mlp_only_layers deepstack_visual_indexes"),
    (mapping, "text_config llm_config vision_config thinker_config rope_parameters rope_scaling auto_map"),
)
_GENERATION = _fields((partial(one_or_list, kind=_TOKEN), "eos_token_id"))
# Numbers of tokens that some classes of tokenizers make by themselves.
_TOKENIZER = _fields((_from_zero_to(2**16), "extra_ids offset num_madeup_words"))
# Small images are enlarged to these.
_PROCESSOR = _fields((_up_to(2**26), "min_pixels shortest_edge"), (_up_to(2**14), "height width"))

FILES: Mapping[str, Mapping[str, Kind]] = {
    CONFIG_FILE: _CONFIG,
    GENERATION_FILE: _GENERATION,
    "tokenizer_config.json": _TOKENIZER,
    **dict.fromkeys(PROCESSOR_FILES, _PROCESSOR),
}
"""For each file of a model directory: its checked fields, at any depth, with the check of values that are not null."""


def read_object(path: Path, most: int = LARGEST_FILE) -> dict[str, Any]:
    """Read a JSON file that holds one object.

    Args:
        path: The file.
        most: Largest size of the file that is accepted, in bytes.

    Raises:
        ConfigError: The file cannot be read, is too large, is not UTF-8 or not JSON, is nested too deeply, or is
            not an object.
        ResourceError: The process has run out of file descriptors, or the disk fails.
    """
    try:
        return json_files.read_object(path, most)
    except (OSError, ValueError) as error:
        raise _malformed(path, str(error)) from error


def faults(
    values: Mapping[str, Any], fields: Mapping[str, Kind] = _CONFIG, prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """Find malformed fields of a JSON object, at any depth; null counts as a missing field.

    Args:
        values: The object.
        fields: The check of each field that is checked, by the field's name.
        prefix: Text before the names of fields, for example ``text_config.``.

    Yields:
        The field, dotted from the top, and what is wrong with it.
    """
    for name, value in values.items():
        kind = fields.get(name)
        if kind is not None and value is not None and (wanted := kind(value)):
            yield f"{prefix}{name}", f"it must be {wanted}, but is {_shown(value)}"
        elif isinstance(value, dict):
            yield from faults(value, fields, f"{prefix}{name}.")
    layers, experts = values.get("num_hidden_layers"), [values.get(name) for name in EXPERT_COUNTS]
    most = max((count for count in experts if type(count) is int), default=0)
    if type(layers) is int and layers * most > MOST_EXPERTS:
        yield f"{prefix}num_hidden_layers", f"{layers} layers of {most} experts are more than {MOST_EXPERTS} experts"


def read_config(directory: Path) -> dict[str, Any]:
    """Read ``config.json`` of a model directory, its fields checked, with a ``model_type`` that transformers knows.

    The fields are as :func:`logits_fields` arranges them.

    Raises:
        ConfigError: The file or a field is malformed.
    """
    return logits_fields(as_known(published_config(directory)))


def stated_config(path: str | None, inline: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fields of a run's model, as :func:`logits_fields` arranges them; none if they are malformed.

    It is for checks of what the fields say: other checks report malformed ones.

    Args:
        path: ``model.path``; None = the model is described inline.
        inline: ``model.config``.
    """
    if path is None:
        fields = dict(inline or {})
        return {} if any(faults(fields)) else logits_fields(fields)
    try:
        return read_config(Path(path))
    except ConfigError:
        return {}


def logits_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Put the fields of the part that computes logits on top, if a config has such a part.

    It is the thinker of Qwen2.5-Omni and Qwen3-Omni, which takes text, images and sound and writes text; their talker
    turns that into speech.

    Args:
        fields: A Hugging Face config.

    Returns:
        A copy with the fields of ``thinker_config``, and the ``model_type`` of the whole; or the fields themselves.
    """
    part = fields.get(THINKER)
    return {**fields, **part, "model_type": fields.get("model_type")} if part else fields


def published_config(directory: Path) -> dict[str, Any]:
    """Read ``config.json`` of a model directory as it is, its fields checked.

    Raises:
        ConfigError: The file or a field is malformed.
        ResourceError: The process has run out of file descriptors, or the disk fails.
    """
    return _checked(directory / CONFIG_FILE)


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a file with the content of a ``config.json``, whatever its name; checked and known as a directory's."""
    return as_known(_checked(path, CONFIG_FILE))


def as_known(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a model that transformers knows, and drop the names of code that belong to it.

    A ``model_type`` of :data:`SAME_MODELS` is replaced. Of a model of
    :data:`anytron.task.data.composites.COMPOSITES` only the language model's config is returned.

    Returns:
        A copy, or the fields themselves if their ``model_type`` is another one.
    """
    if (text := language_config(fields)) is not None:
        return text
    known = SAME_MODELS.get(str(fields.get("model_type")))
    if known is None:
        return fields
    return {**{name: value for name, value in fields.items() if name != "auto_map"}, "model_type": known}


def tensor_names(directory: Path) -> TensorNames:
    """Read how a model directory names the tensors of its language model.

    Raises:
        ConfigError: ``config.json`` is malformed.
    """
    if (one := composite(directory)) is not None:
        return TensorNames(one.names)
    fields = published_config(directory) if (directory / CONFIG_FILE).is_file() else {}
    return TensorNames(idle=IDLE if fields.get(THINKER) else ())


def composite(directory: Path) -> Composite | None:
    """Return where a directory has its language model; None if it holds that model alone, or no ``config.json``.

    Raises:
        ConfigError: ``config.json`` is malformed.
    """
    fields = published_config(directory) if (directory / CONFIG_FILE).is_file() else {}
    return None if language_config(fields) is None else COMPOSITES[fields["model_type"]]


def end_tokens(directory: Path) -> list[int]:
    """Read which tokens end a response, from ``generation_config.json``; empty if there is no such file.

    Raises:
        ConfigError: The file is malformed, or the values are not token ids.
        ResourceError: The process has run out of file descriptors, or the disk fails.
    """
    path = directory / GENERATION_FILE
    named = _checked(path).get("eos_token_id", []) if path.is_file() else []
    return named if isinstance(named, list) else [] if named is None else [named]


def file_diagnostics(key: str, directory: Path) -> Iterator[Diagnostic]:
    """Check each of :data:`FILES` that a directory has; report malformed ones under the configuration key ``key``."""
    for entry in sorted(directory.iterdir()) if directory.is_dir() else ():
        if not (entry.is_file() or entry.is_dir()):  # whoever opens a pipe waits for ever
            fix = "copy or download the model directory again"
            yield Diagnostic("error", key, f"{entry} is neither a file nor a link to one", fix)
        elif entry.name.startswith(TOKENIZER_FILES) and entry.stat().st_size > LARGEST_TOKENIZER:
            fix = "copy or download the model directory again"
            limit = f"{LARGEST_TOKENIZER} bytes, the limit for a file of a tokenizer"
            yield Diagnostic("error", key, f"{entry} has more than {limit}", fix)
    for name in FILES:
        try:
            if (directory / name).is_file():
                _checked(directory / name)
        except ConfigError as error:  # noqa: PERF203 - each file by itself
            yield Diagnostic("error", key, f"{error.where}: {error.why}", error.fix)


def _checked(path: Path, kind: str = "") -> dict[str, Any]:
    values = read_object(path, LARGEST_CONFIG)
    if found := [f"{field}: {fault}" for field, fault in faults(values, FILES[kind or path.name])]:
        raise _malformed(path, "; ".join(found))
    return values


def _malformed(path: Path, why: str) -> ConfigError:
    fix = "copy or download the model directory again"
    return ConfigError("A file of a model directory is malformed.", where=str(path), why=why, fix=fix)


def _shown(value: Any) -> str:
    """A value in a message, however long it is."""
    shown = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else f"{value.bit_length()} bits long"
    return shown if len(shown) <= 60 else f"{shown[:60]}..."
