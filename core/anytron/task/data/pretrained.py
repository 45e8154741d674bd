"""Read config, tokenizer and processor of a Hugging Face model directory; no weights are read, no network is used."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import is_zipfile

from anytron.base.errors import ConfigError
from anytron.base.functions import Called, Kind
from anytron.base.garbage import no_collections
from anytron.config.diagnostics import Diagnostic, refuse
from anytron.config.imports import resolve
from anytron.task.data.model_files import (
    CONFIG_FILE,
    GENERATION_FILE,
    PROCESSOR_FILES,
    THINKER,
    as_known,
    composite,
    end_tokens,
    file_diagnostics,
    published_config,
    read_object,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron.config.schema import ModelSection

INDEXER = ".indexer."
"""Part of the names of the weights of DeepSeek sparse attention's indexers, in files and in Megatron."""
_LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm")
_DATA_ONLY: Mapping[str, bool] = {"local_files_only": True, "trust_remote_code": False}
"""Arguments for all that transformers loads: only from the directory, without its code, and without questions."""

SPEAKER_FILE = "spk_dict.pt"

TOKENIZER = Kind("model.tokenizer", Called("A tokenizer's function", gives="a transformers.PreTrainedTokenizerBase"))
PROCESSOR = Kind("model.processor", Called("A processor's function", gives="a transformers.BaseImageProcessor"))
_MADE = (TOKENIZER.key, PROCESSOR.key)
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")


def directory_diagnostics(key: str, directory: Path, without_weights: str) -> Iterator[Diagnostic]:
    """Check that a directory holds a model with weights, whose JSON files are sound.

    Args:
        key: The configuration key that names the directory.
        directory: The directory.
        without_weights: Remedy to print if the directory has no weights.
    """
    if not directory.is_dir():
        yield Diagnostic(
            "error",
            key,
            f"there is no directory {directory}",
            "set the local directory of a Hugging Face model, for example one made by 'hf download'; "
            "a relative path is relative to the YAML file",
        )
        return
    if not (directory / "config.json").is_file():
        fix = "give the directory of a Hugging Face model"
        yield Diagnostic("error", key, f"{directory} has no config.json", fix)
    yield from file_diagnostics(key, directory)
    if not any(found for pattern in WEIGHT_FILES for found in directory.glob(pattern)):
        message = f"{directory} has no weights (looked for {', '.join(WEIGHT_FILES)})"
        yield Diagnostic("error", key, message, without_weights)


def load_hf_config(model: ModelSection) -> Any:
    """Build the model's ``transformers.PretrainedConfig``.

    Raises:
        ConfigError: The directory has no config, or transformers does not know the model or refuses its config.
    """
    if model.path is not None:
        return read_hf_config(Path(model.path))
    from transformers import AutoConfig

    try:
        fields = deepcopy(model.config or {})  # transformers writes into nested fields
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    except Exception as error:  # each model's class refuses its fields in its own way
        raise _unusable("model.config", error) from error


def read_hf_config(directory: Path) -> Any:
    """Build the ``transformers.PretrainedConfig`` of a model directory.

    Settings of the directory that select code are dropped: classes in its files (``auto_map``), and the
    implementations of attention and experts, which may name a kernel on the network. A run must select them in its own
    configuration. What transformers does not know is read as :func:`anytron.task.data.model_files.as_known` says.

    Raises:
        ConfigError: As in :func:`load_hf_config`, or ``config.json`` is malformed.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    fields = published_config(directory)
    known = as_known(fields)
    try:
        if known is fields:
            config = AutoConfig.from_pretrained(directory, **_DATA_ONLY)
        else:
            config = CONFIG_MAPPING[known["model_type"]].from_dict({**known, "_name_or_path": str(directory)})
        config._attn_implementation = config._experts_implementation = None
    except Exception as error:  # as above
        raise _unusable(str(directory / "config.json"), error) from error
    vars(config).pop("auto_map", None)
    return config


def save_hf_config(hf_config: Any, origin: Path, directory: Path) -> None:
    """Write the ``config.json`` of trained weights.

    Args:
        hf_config: The model's ``transformers.PretrainedConfig``.
        origin: The directory that it was read from. If that holds more than a language model, its ``config.json`` is
            written with the same fields, which also describe the rest.
        directory: An existing directory.

    Raises:
        ConfigError: The original ``config.json`` is malformed.
    """
    if composite(origin) is None:
        hf_config.save_pretrained(directory)
    else:
        (directory / CONFIG_FILE).write_text(json.dumps(published_config(origin), indent=2), encoding="utf-8")


def _unusable(where: str, error: Exception) -> ConfigError:
    fix = "correct the config, or install a version of transformers that knows the model"
    return ConfigError(
        "The model's config is not usable.", where=where, why=f"{type(error).__name__}: {error}", fix=fix
    )


def logits_config(hf_config: Any) -> Any:
    """Return the part of a ``transformers.PretrainedConfig`` that computes logits.

    Returns:
        ``thinker_config`` of Qwen2.5-Omni and Qwen3-Omni; any other config itself.
    """
    return getattr(hf_config, THINKER, hf_config)


def model_class(hf_config: Any) -> Any:
    """Choose the transformers class of a ``transformers.PretrainedConfig``.

    Given the result of :func:`logits_config`, the class computes logits. Given another config, it makes a whole model,
    as its published directory has it.

    Returns:
        ``AutoModelForImageTextToText`` for a model that takes images, whether or not the run has any
        (Qwen3.5 is one), ``AutoModelForMultimodalLM`` for a thinker with its talker, else ``AutoModelForCausalLM``.
    """
    from transformers.models.auto import modeling_auto as classes

    if logits_config(hf_config) is not hf_config:
        return classes.AutoModelForMultimodalLM
    sees = type(hf_config) in classes.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return classes.AutoModelForImageTextToText if sees else classes.AutoModelForCausalLM


def take_latent_epsilon(model: Any) -> None:
    """Set the epsilon of latent norms to the config's, in a ``transformers`` model with multi-latent attention.

    transformers makes ``q_a_layernorm`` and ``kv_a_layernorm`` with an epsilon of 1e-6, whatever ``rms_norm_eps`` says;
    Megatron, vLLM and SGLang take ``rms_norm_eps``, which is 1e-5 in Moonlight and GLM-4.7-Flash
    (``deepseek_v3/modeling_deepseek_v3.py``; transformers #44261, vllm #35515). A model without such norms is not
    changed.
    """
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in _LATENT_NORMS:
            module.variance_epsilon = model.config.get_text_config().rms_norm_eps


def turned_in_files(model: Any) -> frozenset[str]:
    """Find the tensors of a ``transformers`` model that published files have with the last two dimensions exchanged.

    The experts of Qwen3-VL-MoE: published files, and vLLM, have ``gate_up_proj`` as ``[E, H, 2 I]``; transformers 5 has
    ``[E, 2 I, H]``, in the model and in files that it writes, and compares shapes when it reads
    (``core_model_loading.py``, ``Transpose(check_dims=True)``).

    Returns:
        Names in ``model.state_dict()``.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    def turns(rule: Any) -> bool:
        operations = rule.operations if isinstance(rule, WeightConverter) else ()
        return any(isinstance(one, Transpose) and getattr(one, "check_dims", False) for one in operations)

    rules = [rule for rule in get_model_conversion_mapping(model, add_legacy=False) if turns(rule)]
    names = model.state_dict(keep_vars=True) if rules else ()
    return frozenset(name for name in names if any(rule.rename_source_key(name)[1] is not None for rule in rules))


def load_tokenizer(model: ModelSection) -> Any:
    """Load the tokenizer from the directory or function in ``model.tokenizer``, by default from ``model.path``.

    Returns:
        A ``transformers.PreTrainedTokenizerBase``.

    Raises:
        ConfigError: The model has no tokenizer, or it cannot be loaded.
    """
    from transformers import PreTrainedTokenizerBase

    directory = _directory_or_made(model, TOKENIZER, PreTrainedTokenizerBase)
    if not isinstance(directory, Path):
        return directory
    return read_tokenizer(directory, "model.tokenizer")


def read_tokenizer(directory: Path, key: str) -> Any:
    """Load the tokenizer in a directory, a ``transformers.PreTrainedTokenizerBase``.

    Args:
        directory: A model directory.
        key: The configuration key that names it, for the error.

    Raises:
        ConfigError: Loading fails.
    """
    from transformers import AutoTokenizer

    return _loaded(AutoTokenizer, directory, "tokenizer", key)


def load_image_processor(model: ModelSection) -> Any:
    """Load the image processor from the directory or function in ``model.processor``, or from ``model.path``.

    Returns:
        A ``transformers.BaseImageProcessor``; None if ``model.processor`` is not set and ``model.path``
        has none.

    Raises:
        ConfigError: Loading fails.
    """
    from transformers import AutoImageProcessor
    from transformers.image_processing_utils import BaseImageProcessor

    if model.processor is None and not (model.path and processor_files(Path(model.path))):
        return None
    directory = _directory_or_made(model, PROCESSOR, BaseImageProcessor)
    if not isinstance(directory, Path):
        return directory
    return _loaded(AutoImageProcessor, directory, "image processor", "model.processor")


def _loaded(auto_class: Any, directory: Path, what: str, key: str) -> Any:
    refuse(file_diagnostics(key, directory))
    fields = published_config(directory) if (directory / CONFIG_FILE).is_file() else {}
    more = {} if as_known(fields) is fields else {"config": read_hf_config(directory)}  # else transformers reads it
    try:
        with no_collections():  # a vocabulary is hundreds of thousands of objects
            return auto_class.from_pretrained(directory, **_DATA_ONLY, **more)
    except Exception as error:  # transformers, and the library of each format, fail in their own ways
        raise ConfigError(
            f"The {what} cannot be loaded.",
            where=str(directory),
            why=f"{type(error).__name__}: {error}",
            fix=f"set {key} to a directory from which transformers can load the {what} without code of that directory"
            + (", or to 'file.py:function', a function of yours that returns it" if key in _MADE else ""),
        ) from error


def processor_files(directory: Path) -> list[Path]:
    """Find the files of a model's processor in its directory."""
    return [file for name in PROCESSOR_FILES if (file := directory / name).is_file()]


def save_processor(model: ModelSection, directory: Path) -> None:
    """Write a model's processor, if it has one, beside the weights, so that the directory is complete.

    Args:
        model: The model whose processor is saved; files are copied as they are.
        directory: An existing directory.

    Raises:
        ConfigError: The processor cannot be loaded, or one of its files is malformed.
    """
    if model.processor is not None and ":" in model.processor:
        load_image_processor(model).save_pretrained(directory)
    elif origin := model.processor or model.path:
        for file in processor_files(Path(origin)):
            read_object(file)  # a link to anything else is not passed on
            shutil.copyfile(file, directory / file.name)


def save_generation_config(model: ModelSection, directory: Path) -> None:
    """Copy a model's ``generation_config.json`` to a directory of weights, if it has one.

    Tokens that end a response are often listed only there (:func:`end_token_ids`).

    Args:
        model: The model; its file is copied as it is.
        directory: An existing directory.

    Raises:
        ConfigError: The file is malformed.
    """
    if model.path is not None and (file := Path(model.path) / GENERATION_FILE).is_file():
        read_object(file)  # a link to anything else is not passed on
        shutil.copyfile(file, directory / GENERATION_FILE)


def save_speakers(model: ModelSection, directory: Path) -> None:
    """Copy the voices of a Qwen2.5-Omni (``spk_dict.pt``), without which transformers does not load its talker.

    Args:
        model: The model; its file is copied as it is, and not unpickled.
        directory: An existing directory.

    Raises:
        ConfigError: The file is not an archive, as torch writes it.
    """
    if model.path is None or not (file := Path(model.path) / SPEAKER_FILE).is_file():
        return
    if not is_zipfile(file):  # a link to anything else is not passed on
        raise ConfigError(
            "A file of a model directory is malformed.",
            where=str(file),
            why="it must be an archive, as torch writes it",
            fix="copy or download the model directory again",
        )
    shutil.copyfile(file, directory / SPEAKER_FILE)


def _directory_or_made(model: ModelSection, kind: Kind, wanted: type) -> Any:
    """Return what the function under a key makes, or the directory to load from (``model.path`` by default)."""
    reference = getattr(model, kind.key.removeprefix("model."))
    if reference is not None and ":" in reference:
        function, where = resolve(reference, kind), f"{kind.key} = {reference}"
        made = kind.call.call(function, where, kind=ConfigError)
        if not isinstance(made, wanted):
            raise kind.call.unusable(function, type(made).__name__).error(where, ConfigError)
        return made
    directory = reference or model.path
    assert directory is not None  # the schema wants a tokenizer where there is no path
    return Path(directory)


def end_token_ids(model: ModelSection, tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    """Collect the tokens that end a response, from the tokenizer and from ``generation_config.json``.

    Instruction-tuned checkpoints often name several (end of turn, end of text), and only in that file.

    Raises:
        ConfigError: A token is not in the model's vocabulary, or ``generation_config.json`` is malformed.
    """
    ends = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    if model.path is not None:
        ends.update(end_tokens(Path(model.path)))
    if ends and max(ends) >= vocab_size:
        from_tokenizer = max(ends) == tokenizer.eos_token_id
        raise ConfigError(
            "A token that ends responses is not in the model's vocabulary.",
            where=model.tokenizer or model.path or "model.tokenizer" if from_tokenizer else str(model.path),
            why=f"eos_token_id is {max(ends)}, but the vocabulary has {vocab_size} tokens",
            fix="set model.tokenizer to the tokenizer that belongs to the model"
            if from_tokenizer
            else f"correct eos_token_id in {GENERATION_FILE}",
        )
    return tuple(sorted(ends))


def padding_token_id(model: ModelSection, tokenizer: Any, ends: tuple[int, ...], vocab_size: int) -> int:
    """Choose the token that pads prompts: the tokenizer's padding token, else one that ends responses, else 0.

    Padding is masked, but the model still looks up its embedding.

    Args:
        model: The model that the tokenizer belongs to.
        tokenizer: A Hugging Face tokenizer.
        ends: Tokens that end a response.
        vocab_size: Token ids are below this.

    Raises:
        ConfigError: The tokenizer's padding token is not in the model's vocabulary.
    """
    if tokenizer.pad_token_id is None:
        return min(ends, default=0)
    padding = int(tokenizer.pad_token_id)
    if 0 <= padding < vocab_size:
        return padding
    raise ConfigError(
        "The tokenizer pads with a token that is not in the model's vocabulary.",
        where=model.tokenizer or model.path or "model.tokenizer",
        why=f"pad_token {tokenizer.pad_token!r} is {padding}, but the vocabulary has {vocab_size} tokens",
        fix="set pad_token in the directory's tokenizer_config.json to a token that the model has, for example its "
        "end token, or use the tokenizer that belongs to the model",
    )
