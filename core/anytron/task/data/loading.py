"""Load the prompts of one source in columns; prompts of files that an earlier start has kept are read from there."""

from __future__ import annotations

import os
from importlib.util import find_spec
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from anytron.base.errors import ConfigError, DataError
from anytron.config.data import SOURCE_OPTIONS
from anytron.task.data.columns import in_memory
from anytron.task.data.kept_prompts import files_of_source, find, gather, key_of
from anytron.task.data.reading import read_files, read_prompts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from functools import partial
    from pathlib import Path

    from anytron.config.data import MixedSource
    from anytron.task.data.columns import Numbers, PromptColumns
    from anytron.task.data.prompts import TokenizedPrompt
    from anytron.task.data.vision import VisionProcessor

Part = TypeVar("Part")
TELL_S = 10.0
"""Seconds between reports of how many prompts have been read."""
BYTES_OF_A_PROCESS = 4 << 20
"""Bytes of files for each process that tokenises; a process starts in a fraction of a second."""
MOST_PROCESSES = 8


def silent(text: str) -> None:
    """Ignore a report of progress."""
    del text


def load_columns(
    source: MixedSource,
    key: str,
    tokenize: partial[Iterator[TokenizedPrompt]],
    tokenizer: Any,
    vision: VisionProcessor | None,
    folder: Path | None,
    tell: Callable[[str], None],
) -> PromptColumns:
    """Load the prompts, or examples, of a source.

    Args:
        source: The section that names the source.
        key: Configuration key of the source.
        tokenize: Function that tokenises prompts; all its arguments are bound, except ``(prompts, tokenizer, vision)``.
        tokenizer: A Hugging Face tokenizer.
        vision: Image preprocessing; None for a model without image input. Prompts with images are not kept.
        folder: Folder in which tokenised prompts of large files are kept; None = they are not kept.
        tell: Function that is called from time to time with a text that says how many prompts have been read.

    Raises:
        ConfigError: The source does not exist, refuses its options, or lacks its library; ``tokenize`` raises one; or
            the folder cannot be written.
        DataError: The source fails or has an unusable prompt; reading it takes too long, too much memory, or ends the
            process; or a file was changed meanwhile.
        ResourceError: The disk is full.
    """
    if source.source == "dataset" and find_spec("datasets") is None:
        fix = (
            "pip install 'anytron[datasets]'; or write the dataset as JSON lines with Dataset.to_json, and set "
            f"{key}.source=jsonl and {key}.options.path to that file"
        )
        raise ConfigError(
            "The library datasets is not installed.",
            where=f"{key}.source = dataset",
            why="it reads the datasets that Hugging Face's Dataset.save_to_disk writes",
            fix=fix,
        )
    if source.source not in SOURCE_OPTIONS:
        prompts = read_prompts(source, key, tokenize, tokenizer, vision)
        return in_memory(_counted(prompts, lambda _: 1, source.title, tell))
    if vision is not None or source.source == "images":
        pictured = read_files(source, key, tokenize, tokenizer, vision)
        return gather(_counted(pictured, _prompts_of, source.title, tell), None, "")
    files = files_of_source(source)
    arguments = {"function": tokenize.func.__name__, **tokenize.keywords}
    name = "" if folder is None else key_of(source, files, tokenizer, arguments)
    if (found := find(folder, name)) is not None:
        return found
    useful = 1 + sum(size for _, size, *_ in files) // BYTES_OF_A_PROCESS
    processes = min(useful, len(os.sched_getaffinity(0)), MOST_PROCESSES)
    frames = read_files(source, key, tokenize, tokenizer, None, processes)

    def unchanged() -> Iterator[dict[str, Numbers]]:
        yield from _counted(frames, _prompts_of, source.title, tell)
        if files_of_source(source) != files:
            raise DataError(
                "A file of prompts was changed while it was read.",
                where=f"{key}.source = {source.source} ({source.options.get('path')})",
                fix="start again when the files are complete",
            )

    return gather(unchanged(), folder, name)


def _prompts_of(frame: dict[str, Numbers]) -> int:
    return len(frame["lengths"])


def _counted(
    parts: Iterable[Part], prompts_of: Callable[[Part], int], title: str, tell: Callable[[str], None]
) -> Iterator[Part]:
    """Yield parts, and tell from time to time how many prompts they had."""
    count, next_time = 0, monotonic() + TELL_S
    for part in parts:
        yield part
        count += prompts_of(part)
        if monotonic() >= next_time:
            tell(f"reading prompts of {title}: {count:,} so far")
            next_time = monotonic() + TELL_S
