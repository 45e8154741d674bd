"""Try out model directories in a confined process, before the driver loads the same files.

Libraries that read configs, tokenizers and processors can abort, or compute and allocate without end, on malicious
files. So they read the files in the confined process first, and the driver gets only an error message. If
the driver needs only a few plain values of a directory, it does not read the directory itself.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron.base.errors import ConfigError
from anytron.task.data.model_files import CONFIG_FILE, read_config
from anytron.task.data.pretrained import (
    load_hf_config,
    load_image_processor,
    load_tokenizer,
    processor_files,
    read_hf_config,
    read_tokenizer,
)
from anytron.task.isolation.reader import ConfinedReader, Errand

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron.base.errors import AnytronError
    from anytron.config.schema import ModelSection
    from anytron.task.isolation.reader import Note

AT_ONCE = 4096
"""Tokens that are decoded in one call."""
_OWN = "model"
_LOADED = "loaded"
_FIX = "copy or download the model directory again; if it is an unchanged copy, the published files are at fault"


@dataclass(frozen=True)
class AskedModel:
    """The facts about a teacher or a reward model that the driver needs.

    Attributes:
        vocabulary: The model's tokens and their ids.
        context_length: Number of tokens that the model can see; None = unlimited.
    """

    vocabulary: Mapping[str, int]
    context_length: int | None


@contextmanager
def examined(
    model: ModelSection, asked: Mapping[str, Path] | None = None, critic: Path | None = None
) -> Iterator[dict[str, AskedModel]]:
    """Load config, tokenizer and image processor of a model in a confined process, before the driver does.

    While the ``with`` block runs, the process decodes every token, and tokenises every character that tokens have.
    Leaving the block waits until this has succeeded; so the block may load config and tokenizer, but not use them. The
    result of a user's function is not checked, because the user's programs are trusted.

    Args:
        model: The model.
        asked: Directories of the teacher and the reward model, by their configuration keys; None = the run has neither.
        critic: Model directory of the critic, whose config is read too; None = ``critic.path`` is not set.

    Yields:
        Facts about the models in ``asked``, by their keys.

    Raises:
        ConfigError: A part of the model cannot be loaded or used within the limits of a
            :class:`~anytron.task.isolation.reader.ConfinedReader`.
    """
    places = {key: f"{directory} ({key})" for key, directory in (asked or {}).items()}
    if critic is not None:
        places["critic.path"] = f"{critic} (critic.path)"
    own = model.path is not None or not (_made(model.tokenizer) and (model.processor is None or _made(model.processor)))

    def service(key: str, note: Note) -> Iterator[Any]:
        if key == _OWN:
            yield from _load_and_use(model, note)
        elif asked and key in asked:
            yield _facts(asked[key], key, note)
        elif critic is not None:
            read_hf_config(critic)

    if places or own:
        _import_once(model, *(asked or {}).values(), *(() if critic is None else (critic,)))
    reader = ConfinedReader(service)
    try:
        answers = {key: list(islice(reader.ask(key, _errand(place)), 2)) for key, place in places.items()}
        if answers.pop("critic.path", []):
            raise _nonsense(_errand(places["critic.path"]))
        found = {key: _asked(answer, _errand(places[key])) for key, answer in answers.items()}
        if not own:
            yield found
            return
        errand = _errand(f"{model.path or model.tokenizer} (model.path, model.tokenizer, model.processor)")
        steps = reader.ask(_OWN, errand)
        if next(steps, None) != _LOADED:
            raise _nonsense(errand)
        yield found
        if next(steps, None) is not None:  # the files may have taken the process over: it could answer without end
            raise _nonsense(errand)
    finally:
        reader.close()


def _errand(place: str) -> Errand:
    return Errand(ConfigError, "A model directory cannot be loaded.", place, _FIX)


def _import_once(model: ModelSection, *directories: Path) -> None:
    """Import what loading these directories imports: otherwise the confined process would, and the driver once more.

    Some classes of configs import half of the library, and with accelerate a vendor's package that prints where only
    results are expected; most import next to nothing. So only the classes that the directories name are imported.
    """
    own = None if _made(model.tokenizer) else model.tokenizer or model.path
    places = {*directories, *(Path(one) for one in (model.path, own) if one is not None)}
    types = [(model.config or {}).get("model_type")]
    types += [read_config(place).get("model_type") for place in places if (place / CONFIG_FILE).is_file()]
    auto = import_module("transformers").models.auto
    with redirect_stdout(sys.stderr):
        for name in ("AutoConfig", "AutoTokenizer"):
            getattr(auto, name)
        for one in types:
            if one in auto.CONFIG_MAPPING:
                auto.CONFIG_MAPPING[one]


def _made(reference: str | None) -> bool:
    """Whether a reference names a function of the user, not a directory."""
    return reference is not None and ":" in reference


def _facts(directory: Path, key: str, note: Note) -> dict[str, Any]:
    """Read what the driver needs of a model that is asked about tokens."""
    config = read_hf_config(directory)
    note()
    vocabulary = read_tokenizer(directory, key).get_vocab()
    note()
    context_length = getattr(config.get_text_config(), "max_position_embeddings", None)
    return {"vocabulary": vocabulary, "context_length": context_length}


def _asked(answers: list[Any], errand: Errand) -> AskedModel:
    """Read what the process has answered, which may be anything."""
    match answers:
        case [{"vocabulary": dict(vocabulary), "context_length": length}] if all(
            type(number) is int for number in vocabulary.values()
        ) and (length is None or type(length) is int):
            return AskedModel(vocabulary, length)
    raise _nonsense(errand)


def _nonsense(errand: Errand) -> AnytronError:
    return errand.failed("the reading process wrote an invalid answer")


def _load_and_use(model: ModelSection, note: Note) -> Iterator[str]:
    """Load a model's files; say so; use its tokenizer."""
    load_hf_config(model)
    note()
    tokenizer = None if _made(model.tokenizer) else load_tokenizer(model)
    note()
    if not _made(model.processor) and (model.processor or (model.path and processor_files(Path(model.path)))):
        load_image_processor(model)
    yield _LOADED
    if tokenizer is not None:
        _use(tokenizer, note)


def _use(tokenizer: Any, note: Note) -> None:
    letters: set[str] = set()
    numbers = _numbers(tokenizer)
    for begin in range(0, len(numbers), AT_ONCE):
        letters.update(tokenizer.decode(numbers[begin : begin + AT_ONCE]))
        note()
    tokenizer("".join(sorted(letters)))


def _numbers(tokenizer: Any) -> list[int]:
    """Return all token ids. If they have no gap, looking up each one is twice as fast as making a vocabulary."""
    count = len(tokenizer)
    if tokenizer.is_fast and None not in map(tokenizer.backend_tokenizer.id_to_token, range(count)):
        return list(range(count))
    return sorted(tokenizer.get_vocab().values())
