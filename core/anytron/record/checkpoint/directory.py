"""The checkpoints of a run: ``step-000120/`` with the engine's files, ``driver.json`` and the manifest.

The file ``best`` beside these directories names the best checkpoint.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from anytron.base.errors import CheckpointError
from anytron.base.files import discard, exhausted, remove, sync, write_durably
from anytron.config.json_files import read_object
from anytron.record.checkpoint.manifest import DRIVER, MANIFEST, DriverState, FileRecord, Manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from anytron.config.schema import RunConfig


BEST = "best"


class Best(BaseModel):
    """The validation that found the best policy so far, whose checkpoint is kept."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = Field(ge=1)
    """Number of completed training steps."""
    metric: str
    """Name of the metric that was compared."""
    direction: Literal["max", "min"]
    """``max`` = higher values are better; ``min`` = lower values are better."""
    value: float
    """The metric's value."""

    def write(self, directory: Path) -> None:
        """Write the file ``best`` atomically: a reader sees the old file or the whole new one."""
        write_durably(directory / BEST, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def read(cls, directory: Path) -> Best | None:
        """Read the file ``best``; None if there is none.

        Raises:
            CheckpointError: The file is damaged.
        """
        path = directory / BEST
        try:
            return cls.model_validate(read_object(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise CheckpointError(
                "The file that names the best checkpoint cannot be read.",
                where=str(path),
                why=str(error),
                fix="delete this file: the checkpoints themselves are not affected",
            ) from error


CHECKPOINTS = "checkpoints"
"""Name, in a run's directory, of its checkpoints."""
TRAINING = "training"
"""Name, in a checkpoint, of the training engine's files."""
_STEP = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: one that has a manifest.

    Attributes:
        path: Directory of the checkpoint.
        step: Number of completed training steps.
    """

    path: Path
    step: int

    @property
    def training(self) -> Path:
        """The directory of the training engine's files."""
        return self.path / TRAINING

    def manifest(self) -> Manifest:
        """Read the checkpoint's manifest.

        Raises:
            CheckpointError: The manifest is missing or damaged, or has a format of another version.
            ResourceError: The file cannot be read now.
        """
        return Manifest.read(self.path)

    def state(self) -> DriverState:
        """Read the driver's state.

        Raises:
            CheckpointError: The file of the state is missing or damaged.
        """
        return DriverState.read(self.path)

    def verify(self) -> None:
        """Read every file and compare it with the manifest.

        Raises:
            CheckpointError: A file is missing, has changed or was added.
            ResourceError: A file cannot be read now.
        """
        problems = self.manifest().problems(self.path)
        if problems:
            raise CheckpointError(
                "The checkpoint is damaged.",
                where=str(self.path),
                why="; ".join(problems),
                fix=f"use another checkpoint: `anytron checkpoint list {self.path.parent}` shows them",
            )


class CheckpointDirectory:
    """The directory in which a run's checkpoints lie.

    Args:
        path: The directory; it is created together with the first checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begun: Path | None = None

    @classmethod
    def of(cls, config: RunConfig) -> CheckpointDirectory:
        """Find where a run's checkpoints are: ``checkpoint.path``, or in its output directory."""
        default = Path(config.trainer.output_dir) / CHECKPOINTS
        return cls((default if config.checkpoint.path is None else Path(config.checkpoint.path)).absolute())

    def complete(self) -> list[Checkpoint]:
        """List the complete checkpoints, the oldest first."""
        steps = self._steps()
        return [Checkpoint(steps[step], step) for step in sorted(steps) if (steps[step] / MANIFEST).is_file()]

    def interrupted(self) -> list[Path]:
        """List incomplete checkpoints: a save is in progress, or the run ended during a save."""
        return [path for path in self._steps().values() if not (path / MANIFEST).is_file()]

    def sweep(self, tell: Callable[[str], None]) -> None:
        """Delete incomplete checkpoints, and the file ``best`` if the checkpoint that it names no longer exists.

        The caller must hold the run's lock, so that no save is in progress.

        Raises:
            CheckpointError: The file that names the best checkpoint is damaged.
        """
        for path in self.interrupted():
            tell(f"deleting {path}: saving this checkpoint was interrupted")
            discard(path)
        if self.best() is None:
            remove(self.path / BEST)

    def newest_good(self, tell: Callable[[str], None]) -> Checkpoint | None:
        """Find the newest complete checkpoint whose files are all as they were written.

        Newer checkpoints that are damaged are renamed, so that they are no longer found but can be inspected.

        Returns:
            The checkpoint; None if no checkpoint was ever completed.

        Raises:
            CheckpointError: There are complete checkpoints, but none can be used.
        """
        found = self.complete()
        damaged = []
        for checkpoint in reversed(found):
            try:
                checkpoint.verify()
            except CheckpointError as error:
                damaged.append((checkpoint, error))
                continue
            for worse, reason in damaged:
                aside = worse.path.with_name(f"unusable-{worse.path.name}")
                remove(aside)
                worse.path.rename(aside)
                tell(f"{worse.path} is not used, and was renamed to {aside}: {reason.what} {reason.why}")
            return checkpoint
        if not found:
            return None
        raise CheckpointError(
            "No checkpoint of the run can be used.",
            where=str(self.path),
            why="\n".join(f"{checkpoint.path.name}: {error.why}" for checkpoint, error in damaged),
            fix="restore one from a backup, or start over with resume=never and trainer.overwrite=true",
        )

    def begin(self, step: int) -> Path:
        """Make the directory of a new checkpoint; return the subdirectory for the training engine's files.

        Until :meth:`commit`, the subdirectory has a name that no earlier save had. So a rank of an earlier start that
        was only suspended or cut off, and writes on after the run has started again, finds no directory to write into.
        """
        path = self.path / f"step-{step:06d}"
        discard(path)
        self._begun = path / f"{TRAINING}-{secrets.token_hex(8)}"
        self._begun.mkdir(parents=True)
        sync(self.path)
        return self._begun

    def commit(self, state: DriverState, files: Mapping[str, FileRecord]) -> Checkpoint:
        """Complete the checkpoint that :meth:`begin` began: put its files in place, write driver's state and manifest.

        Args:
            state: The driver's state.
            files: The files that the training engine has written and synced to disk, by path relative to the directory
                that :meth:`begin` returned.

        Raises:
            CheckpointError: A file does not exist, or the file system cannot rename a directory.
            ResourceError: The disk is full, or fails.
        """
        path, begun = self.path / f"step-{state.step:06d}", self._begun
        assert begun is not None
        assert begun.parent == path, "it was begun for another step"
        try:
            begun.rename(path / TRAINING)
        except OSError as error:
            raise exhausted(error, str(begun)) or CheckpointError(
                "The checkpoint could not be completed: its directory cannot be renamed.",
                where=str(begun),
                why=str(error),
                fix="set checkpoint.path to a directory of a file system that renames directories (mounted object "
                "stores may not), and continue with resume=auto from the last complete checkpoint",
            ) from error
        sync(path)
        state.write(path)
        records = {f"{TRAINING}/{name}": record for name, record in files.items()}
        Manifest({**records, DRIVER: FileRecord.of(path / DRIVER)}).write(path)
        return Checkpoint(path, state.step)

    def best(self) -> tuple[Best, Checkpoint] | None:
        """Return the best checkpoint with its validation; None if none is marked, or the marked one was deleted.

        Raises:
            CheckpointError: The file ``best`` is damaged.
        """
        found = Best.read(self.path)
        if found is None:
            return None
        return next(((found, checkpoint) for checkpoint in self.complete() if checkpoint.step == found.step), None)

    def prune(self, keep: int) -> None:
        """Delete all complete checkpoints but the best one and the newest ``max(1, keep)``.

        Raises:
            CheckpointError: The file that names the best checkpoint is damaged.
        """
        best = self.best()
        for checkpoint in self.complete()[: -max(1, keep)]:
            if best is not None and checkpoint == best[1]:
                continue
            (checkpoint.path / MANIFEST).unlink()  # from now on it is incomplete, however far the rest comes
            remove(checkpoint.path)

    def _steps(self) -> dict[int, Path]:
        if not self.path.is_dir():
            return {}
        names = ((path, _STEP.fullmatch(path.name)) for path in self.path.iterdir())
        return {int(match[1]): path for path, match in names if match and path.is_dir() and not path.is_symlink()}


def locate(path: Path) -> Checkpoint:
    """Find the checkpoint that a path selects.

    Args:
        path: Directory of the checkpoint; the file ``best`` beside it; or the directory of checkpoints or of a run,
            whose newest checkpoint is taken.

    Raises:
        CheckpointError: ``path`` has no complete checkpoint.
    """
    if path.name == BEST and path.is_file():
        best = CheckpointDirectory(path.parent.absolute()).best()
        if best is None:
            raise CheckpointError(
                "The best checkpoint is missing or incomplete.",
                where=str(path),
                why=f"the file `{BEST}` names its step, but there is no complete checkpoint of that step",
                fix=f"use another checkpoint: `anytron checkpoint list {path.parent}` shows them",
            )
        return best[1]
    for directory in (path / CHECKPOINTS, path):
        complete = CheckpointDirectory(directory.absolute()).complete()
        if complete:
            return complete[-1]
    state = DriverState.read(path) if (path / MANIFEST).is_file() else None
    if state is None:
        raise CheckpointError(
            "No complete checkpoint was found.",
            where=str(path),
            why=f"neither {path} nor a step-* directory in it has a {MANIFEST}"
            if path.is_dir()
            else "no such directory",
            fix="give the directory of a checkpoint, or of a run",
        )
    return Checkpoint(path.absolute(), state.step)
