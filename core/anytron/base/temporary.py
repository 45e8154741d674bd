"""Directories that outlive no run, even if its processes are killed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from typing_extensions import Self

from anytron.base.files import Lock, LockedError, remove

WEIGHTS = "anytron-weights-"
"""Of the directory through which weights go from the training engine to the rollout engines."""
LOCK = "lock"


class PrivateDirectory:
    """A directory of this user alone in ``TMPDIR``. A context manager: leaving deletes it.

    A process that is killed leaves its directory behind: the next one of the same user on this machine that makes one
    of the same prefix deletes it. A directory whose lock is held is of a living process.

    Args:
        prefix: What its name begins with.

    Attributes:
        path: Of the directory.
    """

    def __init__(self, prefix: str) -> None:
        temporary = Path(tempfile.gettempdir())
        for path in temporary.glob(f"{prefix}*"):
            _delete_stale(path)
        # It gets its name when it is locked: until then no other process may take it for stale.
        unlocked = Path(tempfile.mkdtemp(prefix=f".{prefix}"))
        self._lock = Lock(unlocked / LOCK)
        self.path = unlocked.rename(temporary / unlocked.name.removeprefix("."))

    def delete(self) -> None:
        """Delete it, with all that is in it."""
        remove(self.path)
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.delete()


def _delete_stale(path: Path) -> None:
    """Delete the directory of a process of this user that has ended without doing so."""
    try:
        status = path.lstat()
        if path.is_symlink() or not path.is_dir() or status.st_uid != os.geteuid() or not (path / LOCK).is_file():
            return
        lock = Lock(path / LOCK)
    except (LockedError, FileNotFoundError):  # of a living process; or another one is deleting it
        return
    if lock.effective:
        remove(path)
    lock.release()
