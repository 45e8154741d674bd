"""Keep tokenised prompts of large files on disk, so that a later start maps them into memory.

A folder is found by a digest of everything that its prompts depend on: the files (path, size, time of the last change),
the options of the source, the tokenizer, the chat template and its arguments, the code of this package, and the
versions of the libraries.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import re
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anytron.base.errors import ConfigError, DataError, ResourceError
from anytron.base.files import PrivateDirectory, exhausted, remove
from anytron.config.json_files import read_object
from anytron.task.data.columns import COLUMNS, checked, encoded
from anytron.task.data.rows import files_of, files_of_dataset

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron.config.data import DataSection, MixedSource
    from anytron.task.data.columns import Numbers, PromptColumns

logger = logging.getLogger(__name__)

KEPT_FROM = 20_000
"""Number of prompts from which a source is written to disk; fewer are tokenised in seconds, and stay in memory."""
KEPT_FROM_BYTES = 64 << 20
"""Bytes of columns from which a source with fewer prompts is written to disk, too."""
UNUSED_DAYS = 30
"""Days after its last use after which a folder of prompts is deleted."""
OWN_FOLDER = "anytron-prompts"
"""Name of the folder inside of ``data.cache_dir`` that holds all prompts; nothing outside of it is ever deleted."""
HEADER = "prompts.json"
"""File that is written last, with the number of bytes of each column."""
_PART, _TEMPORARY = ".part-", "anytron-prompts-"
_FLAGS = ("add_bos_token", "add_eos_token", "split_special_tokens", "clean_up_tokenization_spaces")
"""Attributes that transformers' tokenizers read at each call."""
_OURS = re.compile(r"[0-9a-f]{40}|\.part-.+")
"""Names of the folders that are made here."""


def cache_folder(given: str | None) -> Path | None:
    """Return the folder for prompts that ``data.cache_dir`` (``given``) asks for; None = prompts are not kept."""
    if given != "auto":
        return None if given is None else Path(given).expanduser().absolute() / OWN_FOLDER
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / OWN_FOLDER
    try:
        return Path.home() / ".cache" / OWN_FOLDER
    except RuntimeError:  # an account without a home directory
        return None


def files_of_source(source: DataSection | MixedSource) -> list[tuple[str, int, int, int]]:
    """Return for each file: path, size in bytes, and times in ns of the last change of content and of any change.

    Raises:
        DataError: A file does not exist, or its size and times cannot be read.
    """
    path = Path(str(source.options.get("path")))
    try:
        whole = source.source == "dataset" and path.is_dir()
        files = files_of_dataset(path) if whole else files_of(str(path))
        states = [(str(file), file.stat()) for file in files]
    except (OSError, ValueError, KeyError, TypeError) as error:  # a dataset's state.json may be anything
        fix = "check the source's option `path`"
        raise exhausted(error) or DataError(
            "The prompts cannot be read.", where=str(path), why=f"{type(error).__name__}: {error}", fix=fix
        ) from error
    return [(name, state.st_size, state.st_mtime_ns, state.st_ctime_ns) for name, state in states]


def key_of(source: DataSection | MixedSource, files: object, tokenizer: Any, arguments: Mapping[str, Any]) -> str:
    """Return a digest of everything that tokenised prompts depend on; empty if the tokenizer cannot be serialised.

    Args:
        source: The source.
        files: Files of the source, from :func:`files_of_source`.
        tokenizer: A Hugging Face tokenizer.
        arguments: Further arguments of the tokenisation.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not type(tokenizer).__module__.startswith("transformers."):
        return ""
    try:
        rules = backend.to_str()
    except Exception:  # noqa: BLE001 - a part of it is written in Python: the library raises nothing narrower
        return ""
    parts = [
        [_own_code(), *(version(name) for name in ("transformers", "tokenizers", "jinja2"))],
        [source.source, source.options, files],
        [type(tokenizer).__name__, rules, tokenizer.special_tokens_map, tokenizer.chat_template],
        {name: getattr(tokenizer, name, None) for name in _FLAGS},
        arguments,
    ]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()


@cache
def _own_code() -> str:
    """Digest the modules that make tokens of files: a checkout is edited without a new version."""
    whole = hashlib.blake2b(digest_size=16)
    for file in sorted(Path(__file__).parent.glob("*.py")):
        whole.update(file.read_bytes())
    return whole.hexdigest()


def find(folder: Path | None, key: str) -> PromptColumns | None:
    """Map the prompts that an earlier start has kept into memory; None if there are none.

    Damaged prompts count as missing, and a warning says so.
    """
    if folder is None or not key:
        return None
    place = folder / key
    try:
        sizes = read_object(place / HEADER)
        found = _mapped(place, sizes)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning(
            "the tokenized prompts kept in %s are damaged, so the files are tokenized again: %s", place, error
        )
        return None
    with suppress(OSError):  # another user's
        os.utime(place / HEADER)
    return encoded(found, place)


def gather(frames: Iterator[dict[str, Numbers]], folder: Path | None, key: str) -> PromptColumns:
    """Put frames of prompts together: few in memory, many in files that are mapped into memory.

    Args:
        frames: Arrays from :func:`anytron.task.data.columns.checked`.
        folder: Folder in which many prompts are kept; None = they are in temporary files until the process ends.
        key: Key of the prompts, from :func:`key_of`; empty = the same as ``folder=None``.

    Raises:
        ConfigError: The folder cannot be written.
        ResourceError: The disk is full.
    """
    before: list[dict[str, Numbers]] = []
    count = size = 0
    for frame in frames:
        before.append(frame)
        count += len(frame["lengths"])
        size += sum(column.nbytes for column in frame.values())
        if count >= KEPT_FROM or size >= KEPT_FROM_BYTES:
            return _on_disk(before, frames, folder if key else None, key)
    empty = {name: np.empty(0, kind) for name, kind in COLUMNS.items()}
    return encoded(checked({name: np.concatenate([empty[name], *(one[name] for one in before)]) for name in COLUMNS}))


def _on_disk(
    before: list[dict[str, Numbers]], rest: Iterator[dict[str, Numbers]], folder: Path | None, key: str
) -> PromptColumns:
    with ExitStack() as leaving, _writable(folder):
        if folder is None:
            part = leaving.enter_context(PrivateDirectory(_TEMPORARY)).path
        else:
            folder.mkdir(parents=True, exist_ok=True)
            _delete_unused(folder)
            part = Path(tempfile.mkdtemp(prefix=_PART, dir=folder))
            leaving.callback(remove, part)
        sizes = dict.fromkeys(COLUMNS, 0)
        with ExitStack() as opened:
            files = {name: opened.enter_context((part / name).open("wb")) for name in COLUMNS}
            for frame in itertools.chain(before, rest):
                for name, file in files.items():
                    sizes[name] += file.write(frame[name].tobytes())
        found = _mapped(part, sizes)
        if folder is None:
            return encoded(found)
        (part / HEADER).write_text(json.dumps(sizes), encoding="utf-8")
        return find(folder, key) or encoded(found, _published(part, folder / key))


def _published(part: Path, place: Path) -> Path | None:
    """Give a complete folder its name, and return the new path; None if that is not possible."""
    try:
        remove(place)  # it is damaged
        part.rename(place)
    except OSError as error:  # another user's, or another start was faster
        logger.warning("the tokenized prompts could not be kept in %s for later starts: %s", place, error)
        return None
    return place


def _mapped(place: Path, sizes: Mapping[str, int]) -> dict[str, Numbers]:
    """Map the columns in a folder into memory; raise OSError or ValueError if they are damaged."""
    arrays: dict[str, Numbers] = {}
    for name, kind in COLUMNS.items():
        size = (place / name).stat().st_size
        if size != sizes[name]:
            raise ValueError(f"{name} has {size} bytes, not {sizes[name]}")
        arrays[name] = np.memmap(place / name, kind, "r") if size else np.empty(0, kind)
    return checked(arrays)


@contextmanager
def _writable(folder: Path | None) -> Iterator[None]:
    """Convert an error of writing prompts to one that says where else they can be kept."""
    try:
        yield
    except OSError as error:
        place = Path(tempfile.gettempdir()) if folder is None else folder
        fix = "set TMPDIR to a folder" if folder is None else "set data.cache_dir to a folder"
        fix += " that you can write and that has room" + ("" if folder is None else ", or data.cache_dir=null")
        known = exhausted(error, str(place))
        kind, why = (ConfigError, str(error)) if known is None else (ResourceError, f"{known.what} {known.why}")
        raise kind("Tokenized prompts cannot be kept.", where=str(place), why=why, fix=fix) from error


def _delete_unused(folder: Path) -> None:
    """Delete prompts that no run has used for :data:`UNUSED_DAYS`, and what killed processes have left."""
    for place in folder.iterdir():
        if not _OURS.fullmatch(place.name) or place.is_symlink() or not place.is_dir():
            continue
        header = place / HEADER
        with suppress(OSError):  # another process deletes it
            used = (header if header.is_file() else place).stat().st_mtime
            if time.time() - used > UNUSED_DAYS * 86_400:
                remove(place)
