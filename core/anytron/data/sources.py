"""Where prompts come from: registered sources and functions of the user."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from anytron.config.imports import resolve
from anytron.config.plain import DEEPEST, is_too_deep, is_writable, strings
from anytron.data.prompts import Prompt
from anytron.data.reasoning_gym import reasoning_gym
from anytron.errors import ConfigError, DataError

if TYPE_CHECKING:
    from anytron.config.schema import DataSection

PromptSource = Callable[..., Iterable[Prompt]]
"""(**options) -> prompts."""


def jsonl(path: str, prompt_key: str = "prompt", id_key: str = "id", images_key: str = "images") -> list[Prompt]:
    """Read prompts from a file with one JSON object per line.

    Args:
        path: The file, UTF-8, with or without a mark at its beginning; in a configuration relative to the YAML file.
            Empty lines are skipped. Nothing but a line feed ends a line: JSON has other separators inside of strings.
        prompt_key: The entry that holds the prompt: a string, a list of messages (objects with ``role``
            and ``content``), or a list of token ids.
        id_key: The entry that names the prompt; without it the name is ``line N``.
        images_key: The entry that lists paths of pictures, relative to the file's directory; may be missing.

    Returns:
        Prompts in the file's order; all other entries of a line are the prompt's data.

    Raises:
        DataError: The file is missing, or a line is not such an object.
    """
    file = Path(path)
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            "The prompts cannot be read.", where=str(file), why=str(error), fix="check data.options.path"
        ) from error
    return [
        _from_line(line, f"{file}:{number}", f"line {number}", file.parent, (prompt_key, id_key, images_key))
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _from_line(line: str, where: str, name: str, directory: Path, keys: tuple[str, str, str]) -> Prompt:
    prompt_key, id_key, images_key = keys
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError("A line of the prompts is not JSON.", where=where, why=str(error)) from error
    if is_too_deep(record):
        raise DataError("A line of the prompts is nested too deeply.", where=where, why=f"more than {DEEPEST} levels")
    if "\\ud" in line.lower() and (keys_of := [key for key, text in strings(record) if not is_writable(text)]):
        why = f"{keys_of[0]} has half of a surrogate pair (\\ud800 to \\udfff), which is no letter"
        raise DataError("A line of the prompts has text that is none.", where=where, why=why)
    if not isinstance(record, dict) or prompt_key not in record:
        raise DataError(
            f"A line of the prompts has no entry {prompt_key!r}.",
            where=where,
            why=f"it has {', '.join(map(repr, record)) if isinstance(record, dict) else type(record).__name__}",
            fix="set data.options.prompt_key",
        )
    value, paths = record.pop(prompt_key), record.pop(images_key, [])
    name = str(record.get(id_key, name))
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise DataError(
            f"The entry {images_key!r} is no list of paths.", where=where, fix="give a list, also for a single image"
        )
    images = tuple(directory / path for path in paths)
    if isinstance(value, str):
        return Prompt(name, text=value, images=images, data=record)
    if isinstance(value, list) and all(type(token) is int for token in value):
        return Prompt(name, tokens=tuple(value), images=images, data=record)
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        return Prompt(name, messages=tuple(value), images=images, data=record)
    raise DataError(
        "A prompt is neither a string nor a list of messages or token ids.",
        where=where,
        why=f"it is {type(value).__name__}",
    )


SOURCES: Mapping[str, PromptSource] = MappingProxyType({"jsonl": jsonl, "reasoning_gym": reasoning_gym})
"""By their name in ``data.source``."""


def load_prompts(data: DataSection) -> list[Prompt]:
    """Get all prompts of a run.

    Raises:
        ConfigError: The source does not exist, or refuses its options.
        DataError: It fails, or gives something else than prompts.
    """
    source: Callable[..., Any] = resolve(data.source, key="data.source", registered=SOURCES)
    try:
        prompts = list(source(**data.options))
    except (ConfigError, DataError):
        raise
    except (Exception, SystemExit) as error:
        raise DataError(
            "The source of prompts failed.",
            where=f"data.source = {data.source}",
            why=f"{type(error).__name__}: {error}",
            fix="correct the function or data.options",
        ) from error
    for position, prompt in enumerate(prompts):
        if not isinstance(prompt, Prompt):
            raise DataError(
                "The source gives something else than prompts.",
                where=f"data.source = {data.source}",
                why=f"entry {position} is {type(prompt).__name__}",
                fix="return anytron.data.Prompt objects",
            )
    return prompts
