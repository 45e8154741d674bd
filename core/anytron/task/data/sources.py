"""Where prompts come from: registered sources and functions of the user."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from anytron.base.errors import DataError
from anytron.base.functions import Called, Kind, has, is_async
from anytron.config.data import DatasetOptions, ImagesOptions, ReadingOptions
from anytron.config.imports import resolve
from anytron.task.data.prompts import Prompt
from anytron.task.data.reasoning_gym import reasoning_gym
from anytron.task.data.records import inside, prompt_of, user_message
from anytron.task.data.rows import Row, csv_rows, dataset_rows, files_of, jsonl_rows, parquet_rows

if TYPE_CHECKING:
    from anytron.config.data import DataSection, MixedSource

Item = TypeVar("Item")
SOURCE = Called(
    "A source of prompts",
    given="the entries of data.options are its keyword arguments",
    gives=f"anytron.task.data.Prompt objects, in a list or one after another with yield ({has(Prompt)})",
)
DATA_SOURCE = Kind("data.source", SOURCE, options=True)
PromptSource = Callable[..., Iterable[Prompt]]
"""A function that takes ``data.options`` as keyword arguments, and returns prompts."""

PICTURES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
"""Endings, in lower case, of the files that the source ``images`` takes."""
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""Files that describe the images in Hugging Face's folders of images."""


@dataclass(frozen=True)
class Share:
    """The share of a source's prompts that one of several processes reads.

    The processes take turns: each reads a run of consecutive prompts, and passes over the runs of the other processes.

    Attributes:
        number: Number of the process, from 0.
        processes: Number of processes.
        run: Number of consecutive prompts of a run.
        note: Function that is called for each item, also of other shares, to report progress.
    """

    number: int = 0
    processes: int = 1
    run: int = 1024
    note: Callable[[], None] = lambda: None

    def of(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items of this share."""
        for index, item in enumerate(items):
            self.note()
            if index // self.run % self.processes == self.number:
                yield item


def from_files(rows_of: Callable[[Path], Iterator[Row]], *, share: Share = Share(), **options: Any) -> Iterator[Prompt]:
    """Read the prompts of one or several files.

    Args:
        rows_of: Function that reads the rows of a file.
        share: Rows that are read; others are passed over.
        options: Fields of :class:`anytron.config.data.ReadingOptions`.

    Raises:
        DataError: A file is missing, or a row is not a prompt.
    """
    given = ReadingOptions(**options)
    files = files_of(given.path)
    rows = ((row, f"{file.name} " if len(files) > 1 else "") for file in files for row in rows_of(file))
    for row, prefix in share.of(rows):
        yield prompt_of(row, given, prefix)


def dataset(*, share: Share = Share(), **options: Any) -> Iterator[Prompt]:
    """Read the prompts of a Hugging Face dataset on disk; ``options`` are the fields of ``DatasetOptions``.

    Raises:
        DataError: As :func:`dataset_rows`, or a row is not a usable prompt.
    """
    given = DatasetOptions(**options)
    for row in share.of(dataset_rows(Path(given.path), given.split)):
        yield prompt_of(row, given)


def images(*, share: Share = Share(), **options: Any) -> Iterator[Prompt]:
    """Make a prompt of every picture in a folder, with the same question.

    Args:
        share: Pictures that are taken.
        options: Fields of :class:`anytron.config.data.ImagesOptions`.

    Raises:
        DataError: The folder does not exist; it has a file that describes its pictures, which would be ignored; or a
            link leads out of it.
    """
    given = ImagesOptions(**options)
    folder = Path(given.path)
    if not folder.is_dir():
        fix = "set the source's option `path` to a folder of pictures"
        raise DataError("The prompts cannot be read.", where=given.path, why="no such folder", fix=fix)
    if described := [name for name in METADATA if (folder / name).is_file()]:
        raise DataError(
            "The source 'images' does not read folders that have a metadata file.",
            where=str(folder / described[0]),
            why="the source asks the same question about every image, and would ignore the metadata",
            fix="read the metadata file with the source jsonl, csv or parquet, and set its option `columns`: "
            "{images: file_name, ...}",
        )
    for found in share.of(sorted(file for file in folder.rglob("*") if file.suffix.lower() in PICTURES)):
        name = found.relative_to(folder).as_posix()
        file = inside(folder, name, f"prompt {name}")
        data = {"file": name, "label": file.parent.name if file.parent != folder else ""}
        if not given.chat:
            yield Prompt(name, text=given.prompt, images=(file,), data=data)
            continue
        system = [] if given.system is None else [{"role": "system", "content": given.system}]
        yield Prompt(name, messages=(*system, user_message(given.prompt, 1)), images=(file,), data=data)


SOURCES: Mapping[str, PromptSource] = MappingProxyType(
    {
        "jsonl": partial(from_files, jsonl_rows),
        "csv": partial(from_files, csv_rows),
        "parquet": partial(from_files, parquet_rows),
        "dataset": dataset,
        "images": images,
        "reasoning_gym": reasoning_gym,
    }
)
"""The registered sources, by their name in ``data.source``. :data:`anytron.config.data.SOURCE_OPTIONS` has the options
of the sources that read files."""


def load_prompts(section: DataSection | MixedSource, key: str = "data", share: Share | None = None) -> Iterator[Prompt]:
    """Yield the prompts of one source.

    Args:
        section: The section with the source and its options.
        key: Configuration key of the section.
        share: Prompts that this process reads, for a source that reads files; None = all.

    Raises:
        ConfigError: The source does not exist, or refuses its options.
        DataError: The source fails, or yields something other than prompts.
    """
    assert section.source is not None, "a mix is loaded source by source"
    where, options = f"{key}.source", section.options
    source = partial(resolve(section.source, DATA_SOURCE, key=where, registered=SOURCES, options=options), **options)
    if share is not None:
        source = partial(source, share=share)
    found = SOURCE.call(source, where := f"{where} = {section.source}")
    if not isinstance(found, Iterable):
        raise SOURCE.unusable(source, type(found).__name__).error(where)
    with SOURCE.guard(source, where):
        for position, prompt in enumerate(found):
            if not isinstance(prompt, Prompt):
                shown = "something async" if is_async(prompt) else type(prompt).__name__
                raise SOURCE.unusable(source, f"{shown} as entry {position}, not a Prompt").error(where)
            yield prompt
