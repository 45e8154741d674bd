"""The manifest of a checkpoint, which lists every file with size and checksum; and the driver's state.

All other state of a run follows from its configuration or is saved by the training engine.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from anytron.base.errors import CheckpointError, ResourceError
from anytron.base.files import PRIVATE, exhausted, write_durably
from anytron.config.json_files import WITH_CONFIGURATION, read_object
from anytron.task.data.beginning import Beginning  # noqa: TC001 - pydantic reads the annotation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


FORMAT = 1
"""Version of the layout of a checkpoint's directory, of the manifest and of ``driver.json``."""
MANIFEST = "manifest.json"
READERS = 8
"""Number of files that are hashed at one time."""
BLOCK = 1 << 20
"""Bytes that are read at one time."""


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint.

    Attributes:
        size: Size of the file in bytes.
        sha256: SHA-256 of the content, in hexadecimal.
    """

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """Read a file and describe it."""
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
            return cls(file.tell(), digest.hexdigest())


@dataclass(frozen=True)
class Manifest:
    """All files of a checkpoint but the manifest itself.

    Attributes:
        files: Records of the files, by path relative to the checkpoint, with ``/`` between folders.
    """

    files: Mapping[str, FileRecord]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(record.size for record in self.files.values())

    def write(self, directory: Path) -> None:
        """Write the manifest, which makes a checkpoint complete. Its files must be on disk; their sizes are checked.

        Raises:
            CheckpointError: A file is missing or has another size.
        """
        wrong = [problem for name, record in self.files.items() for problem in _size_problems(directory, name, record)]
        if wrong:
            raise CheckpointError(
                "The checkpoint is not complete.",
                where=str(directory),
                why="; ".join(wrong),
                fix="let all training ranks write to one file system (checkpoint.path), and continue with resume=auto",
            )
        files = {name: asdict(self.files[name]) for name in sorted(self.files)}
        write_durably(directory / MANIFEST, json.dumps({"format": FORMAT, "files": files}, indent=1) + "\n")

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read the manifest of a checkpoint.

        Raises:
            CheckpointError: The manifest is missing or damaged, or another version of Anytron wrote it.
            ResourceError: The manifest cannot be opened; it may be intact.
        """
        path = directory / MANIFEST
        try:
            content = read_object(path)
            version = content["format"]
            if version != FORMAT:
                raise CheckpointError(
                    "The checkpoint has a format that this version of Anytron does not read.",
                    where=str(path),
                    why=f"its format is {version!r}; this version reads format {FORMAT}",
                    fix="read the checkpoint with the version of Anytron that wrote it",
                )
            files = {str(name): FileRecord(**record) for name, record in content["files"].items()}
        except FileNotFoundError:
            raise CheckpointError(
                "This checkpoint is not complete.",
                where=str(directory),
                why=f"it has no {MANIFEST}, which is written last" if directory.is_dir() else "no such directory",
                fix=f"use another checkpoint: `anytron checkpoint list {directory.parent}` shows them",
            ) from None
        except OSError as error:
            raise _unreadable(path, error) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                "The manifest of the checkpoint is damaged.",
                where=str(path),
                why=f"{type(error).__name__}: {error}",
                fix=f"use another checkpoint: `anytron checkpoint list {directory.parent}` shows them",
            ) from error
        for name in files:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise CheckpointError(
                    "The manifest names a file outside of the checkpoint.",
                    where=str(path),
                    why=f"{name} is not a path inside of the checkpoint's directory",
                    fix=f"use another checkpoint: `anytron checkpoint list {directory.parent}` shows them",
                )
        return cls(files)

    def problems(self, directory: Path) -> list[str]:
        """Compare all files of a checkpoint with their records, and describe each file that differs or has no record.

        Raises:
            ResourceError: A file exists and cannot be opened, so that its content is unknown.
        """
        with ThreadPoolExecutor(READERS) as pool:  # hashing releases the interpreter's lock
            found = pool.map(lambda item: list(_problems(directory, *item)), self.files.items())
            wrong = [problem for problems in found for problem in problems]
        unknown = sorted(set(_names(directory)) - set(self.files) - {MANIFEST})
        return wrong + [f"{name} is not in the manifest" for name in unknown]


def _problems(directory: Path, name: str, record: FileRecord) -> Iterator[str]:
    try:
        found = list(_size_problems(directory, name, record))
        if not found and FileRecord.of(directory / name) != record:
            found = [f"{name} has a different checksum: its content has changed"]
    except FileNotFoundError:  # deleted meanwhile
        found = [f"{name} is missing"]
    except OSError as error:
        raise _unreadable(directory / name, error) from error
    yield from found


def _unreadable(path: Path, error: OSError) -> ResourceError:
    """Return the error of a file that cannot be opened, so that an intact checkpoint is not set aside for that."""
    return exhausted(error, str(path)) or ResourceError(
        "A file of the checkpoint cannot be read.",
        where=str(path),
        why=str(error),
        fix="give the user of this process permission to read this file and the folders above it",
    )


def _size_problems(directory: Path, name: str, record: FileRecord) -> Iterator[str]:
    path = directory / name
    if not path.is_file() or path.is_symlink():
        yield f"{name or 'a file without a name'} is missing"
    elif (size := path.stat().st_size) != record.size:
        yield f"{name} has {size} bytes and should have {record.size}"


def _names(directory: Path) -> Iterator[str]:
    for folder, _, files in os.walk(directory):
        for name in files:
            yield (Path(folder) / name).relative_to(directory).as_posix()


DRIVER = "driver.json"


class SourceState(BaseModel):
    """The position of a run in the prompts of one source."""

    model_config = ConfigDict(frozen=True)

    epoch: int = Field(ge=0)
    """Number of completed epochs."""
    position: int = Field(ge=0)
    """Number of prompts drawn so far in the current epoch."""
    prompts: int = Field(ge=1)
    """Number of prompts in an epoch; with a different number, ``position`` has no meaning."""
    digest: str = ""
    """Fingerprint of the tokens; a different one means different prompts. Empty in older checkpoints."""


class DriverState(BaseModel):
    """The driver's state after a step. Seeds are not saved: they follow from ``trainer.seed`` and the step."""

    model_config = ConfigDict(frozen=True)

    step: int = Field(ge=1)
    """Number of completed training steps."""
    sampler: tuple[SourceState, ...]
    """Position of the next step in each source of prompts; together, they are its position in the mix of sources."""
    weights_version: int = Field(ge=0)
    """Number of completed optimizer updates of the weights from which the last responses were sampled."""
    config: dict[str, Any]
    """The run's configuration."""
    beginning: Beginning | None = None
    """Time at which the run began, and its chat template; null in older checkpoints."""
    kl: dict[str, float] = Field(default_factory=dict)
    """``kl/coefficient`` and ``policy/kl`` of the step if the KL coefficient adapts, otherwise empty; empty in older
    checkpoints, too."""

    @field_validator("sampler", mode="before")
    @classmethod
    def _of_one_source(cls, given: Any) -> Any:
        """Before there were mixes, a checkpoint had the state of the one source."""
        return (given,) if isinstance(given, dict) else given

    def write(self, directory: Path) -> None:
        """Write the driver's file of a checkpoint, readable by its owner only: a configuration may hold secrets."""
        write_durably(directory / DRIVER, self.model_dump_json(indent=1) + "\n", PRIVATE)

    @classmethod
    def read(cls, directory: Path) -> DriverState:
        """Read the driver's file of a checkpoint.

        Raises:
            CheckpointError: The file is missing or damaged.
        """
        path = directory / DRIVER
        try:
            return cls.model_validate(read_object(path, deepest=WITH_CONFIGURATION))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                "The state of the run in the checkpoint cannot be read.",
                where=str(path),
                why=str(error),
                fix=f"use another checkpoint: `anytron checkpoint list {directory.parent}` shows them",
            ) from error
