"""The directory through which weights go from the training engine to the rollout engine."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from typing_extensions import Self

from anytron.files import Lock, LockedError, remove

PREFIX = "anytron-weights-"
LOCK = "lock"


class WeightExchange:
    """A private directory in ``TMPDIR``. A context manager: leaving deletes it.

    A process that is killed leaves its directory, a whole copy of the weights, behind: the next run of the same user
    on this machine deletes it. A directory whose lock is held is of a living run.

    Attributes:
        path: The directory: weights go through a file or a socket in it.
    """

    def __init__(self) -> None:
        temporary = Path(tempfile.gettempdir())
        for path in temporary.glob(f"{PREFIX}*"):
            _delete_stale(path)
        # It gets its name when it is locked: until then no other run may take it for stale.
        unlocked = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))
        self._lock = Lock(unlocked / LOCK)
        self.path = unlocked.rename(temporary / f"{PREFIX}{unlocked.name.removeprefix(f'.{PREFIX}')}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        remove(self.path)
        self._lock.release()


def _delete_stale(path: Path) -> None:
    """Delete the directory of a run of this user that has ended without doing so."""
    try:
        status = path.lstat()
        if path.is_symlink() or not path.is_dir() or status.st_uid != os.geteuid() or not (path / LOCK).is_file():
            return
        lock = Lock(path / LOCK)
    except (LockedError, FileNotFoundError):  # of a living run; or another one is deleting it
        return
    if lock.effective:
        remove(path)
    lock.release()
