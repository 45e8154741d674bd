"""Try out a model directory in a confined process, before the driver loads the same files.

Libraries that read configs, tokenizers and processors abort, panic, or compute and allocate without end, if their files
were made for that. So they do it there first: an error in words is all that the driver sees of it.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron.base.errors import ConfigError
from anytron.task.data.pretrained import (
    load_image_processor,
    load_tokenizer,
    processor_files,
    read_hf_config,
    read_tokenizer,
)
from anytron.task.isolation.reader import ConfinedReader, Errand

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron.config.schema import ModelSection
    from anytron.task.isolation.reader import Note

AT_ONCE = 4096
"""Tokens that are decoded in one call."""


def examine(model: ModelSection, asked: Mapping[str, Path]) -> None:
    """Load config, tokenizer and image processor of a run's model, and those of others, and use their tokenizers.

    Every token is decoded, and every character that tokens have is tokenised. What a function of the user's makes is
    left out: it is a program, and trusted.

    Args:
        model: The model.
        asked: Directories of models that are asked about the policy's tokens, by their configuration keys.

    Raises:
        ConfigError: Something of it cannot be loaded or used, within the limits of a
            :class:`~anytron.task.isolation.reader.ConfinedReader`.
    """
    own = f"{model.path or model.tokenizer} (model.path, model.tokenizer, model.processor)"
    places = (
        {"model": own}
        if model.path is not None
        or not (_made(model.tokenizer) and (model.processor is None or _made(model.processor)))
        else {}
    )
    places |= {key: f"{directory} ({key})" for key, directory in asked.items()}
    fix = "copy or download the model directory again; if it is an unchanged copy, the published files are at fault"

    def service(key: str, note: Note) -> Iterator[Any]:
        tokenizer: Any = None
        if key != "model":
            read_hf_config(asked[key])
            note()
            tokenizer = read_tokenizer(asked[key], key)
        else:
            if model.path is not None:
                read_hf_config(Path(model.path))
                note()
            if not _made(model.tokenizer):
                tokenizer = load_tokenizer(model)
                note()
            if not _made(model.processor) and (model.processor or (model.path and processor_files(Path(model.path)))):
                load_image_processor(model)
        if tokenizer is not None:
            note()
            _use(tokenizer, note)
        return iter(())

    if places:
        _import_once()
    reader = ConfinedReader(service)
    try:
        for key, place in places.items():
            list(reader.ask(key, Errand(ConfigError, "A model directory cannot be loaded.", place, fix)))
    finally:
        reader.close()


def _import_once() -> None:
    """Import what loading a model directory imports: otherwise the confined process would, and the driver once more.

    Configs import the library's computation of rotary embeddings and all that belongs to it, whichever model's they
    are: accelerate among it, and with it a vendor's package, which may print where only results are expected.
    """
    transformers = import_module("transformers")
    with redirect_stdout(sys.stderr):
        for name in ("AutoConfig", "AutoTokenizer", "PreTrainedTokenizerFast", "LlamaConfig"):
            getattr(transformers, name)


def _made(reference: str | None) -> bool:
    """Whether a function of the user's makes it."""
    return reference is not None and ":" in reference


def _use(tokenizer: Any, note: Note) -> None:
    tokens = sorted(tokenizer.get_vocab().values())
    letters: set[str] = set()
    for begin in range(0, len(tokens), AT_ONCE):
        letters.update(tokenizer.decode(tokens[begin : begin + AT_ONCE]))
        note()
    tokenizer("".join(sorted(letters)))
