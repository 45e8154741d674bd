"""Claim an output directory: one run at a time writes into it, and files that no run has written are left alone."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import Self

from anytron.base.errors import ConfigError, LostDirectoryError
from anytron.base.files import Lock, LockedError, exhausted, lock_owner, remove
from anytron.record.tracking.record import RECORD, RunRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from anytron.config.schema import RunConfig

LOCK = ".lock"
SINKS, PROFILE = "tracking", "profile"
"""Directories of ``tracking.sinks`` and of ``trainer.profile``."""
REPLICAS = "replicas.wanted"
"""File with the number of replicas that ``anytron scale`` has asked for."""
CONTENTS = (
    "config.yaml",
    "patches.json",
    "metrics.jsonl",
    "validation.jsonl",
    "samples.jsonl",
    "images",
    "plots",
    SINKS,
    PROFILE,
    "hf",
    "adapter",
    "critic",
    "initial_model",
    "bad_batches",
    "checkpoints",
    REPLICAS,
    RECORD,  # the last to go: without it nothing here is ours
)
"""What a run writes, besides its logs; ``trainer.overwrite`` deletes these and the logs, and nothing else."""
LOSSES = "losses.jsonl"
"""File with a record of each worker process that died."""
LOGS = ("logs", LOSSES)
"""Files that are kept when a run begins again: logs of worker processes, and records of processes that died."""


class ClaimedDirectory:
    """The output directory of a run, locked. A context manager: leaving, or the end of the process, releases the lock.

    Args:
        config: The run's configuration. The directories ``trainer.output_dir`` and, if it is set, ``checkpoint.path``
            are created and locked.
        tell: Called with each message for the user.

    Attributes:
        path: The directory, absolute.
        record: Record of the run that has written into the directory; None if no run has.

    Raises:
        ConfigError: Another process holds the lock, the directory cannot be written, or it holds files that the run
            would overwrite and that no run has written.
    """

    def __init__(self, config: RunConfig, tell: Callable[[str], None]) -> None:
        self.path = Path(config.trainer.output_dir).absolute()
        places = [("output directory", "trainer.output_dir", self.path)]
        if config.checkpoint.path is not None:
            places.append(("directory of checkpoints", "checkpoint.path", Path(config.checkpoint.path).absolute()))
        with contextlib.ExitStack() as locks:
            self._held = [
                (what, key, path, locks.enter_context(_locked(path, what, key, tell))) for what, key, path in places
            ]
            self.record = RunRecord.read(self.path)
            self._refuse_foreign_files()
            self._locks = locks.pop_all()

    @property
    def earlier_files(self) -> list[str]:
        """Files of an earlier run, if it has written metrics, samples or results; otherwise empty."""
        logs = [self.path / name for name in ("metrics.jsonl", "samples.jsonl")]
        results = [self.path / name for name in ("hf", "checkpoints")]
        if any(log.is_file() and log.stat().st_size > 0 for log in logs) or any(result.exists() for result in results):
            return [name for name in CONTENTS if os.path.lexists(self.path / name)]
        return []

    def lost(self) -> LostDirectoryError | None:
        """Return an error if a locked directory was removed or replaced; None otherwise."""
        for what, key, path, lock in self._held:
            if why := lock.lost():
                with contextlib.suppress(OSError):  # what cannot be examined has been said
                    owner = lock_owner(path / LOCK)
                    why += f", and {owner} writes there" if owner else ""
                return LostDirectoryError(
                    f"The {what} was removed or replaced.",
                    where=f"{key} = {path}",
                    why=why,
                    fix=f"start the run again with resume=auto, and with a different {key} if that directory is in use",
                )
        return None

    def clear(self, *, logs: bool) -> None:
        """Delete the files of the earlier run.

        Args:
            logs: Whether to delete its logs too; otherwise the next run appends to them.
        """
        for name in [*CONTENTS, *(LOGS if logs else ())]:
            for path in (name, f".{name}.part", f".{name}.old"):  # of a process that was killed while it wrote them
                remove(self.path / path)
        self.record = None

    def _refuse_foreign_files(self) -> None:
        present = [name for name in CONTENTS if os.path.lexists(self.path / name)]
        if present and self.record is None:
            raise ConfigError(
                "The output directory holds files that this run would overwrite, and no earlier run wrote them.",
                where=f"trainer.output_dir = {self.path}",
                why=f"it has {', '.join(present)}, but no {RECORD}, which every run writes first",
                fix="set another trainer.output_dir",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        lost = self.lost() if isinstance(error, Exception) and not isinstance(error, LostDirectoryError) else None
        self._locks.close()
        if lost is not None:  # whatever the error says, it follows from this; nor may the run start again there
            raise lost from error


@contextlib.contextmanager
def _locked(path: Path, what: str, key: str, tell: Callable[[str], None]) -> Iterator[Lock]:
    where = f"{key} = {path}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = Lock(path / LOCK)
    except LockedError as error:
        raise ConfigError(
            f"Another run is writing into the {what}.",
            where=where,
            why=f"{error} holds its lock",
            fix=f"set another path for {key}, or stop that run first",
        ) from None
    except OSError as error:
        raise exhausted(error, where) or ConfigError(
            f"The {what} cannot be written.",
            where=where,
            why=str(error),
            fix=f"set {key} to a directory that you can write into",
        ) from error
    if not lock.effective:
        tell(f"{path} is on a file system without locks: make sure that no second run writes into it")
    try:
        yield lock
    finally:
        lock.release()


def overwritten(output_dir: Path, file: Path) -> bool:
    """Whether ``trainer.overwrite`` would delete a file or directory, or something inside of it."""
    output_dir, file = output_dir.resolve(), file.resolve()
    try:
        name = file.relative_to(output_dir).parts[:1]
    except ValueError:
        return False
    return not name or name[0] in (*CONTENTS, *LOGS)
