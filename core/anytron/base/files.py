"""Write files so that a crash, a full disk or a symbolic link cannot damage them; make temporary directories."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import Self

from anytron.base.errors import AnytronError, ResourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TextIO


PRIVATE = 0o600
"""Mode of files that only their owner may read: configurations may hold secrets."""
_EXHAUSTED = {
    errno.ENOSPC: ("The disk is full.", "make room on the file system, then continue the run with resume=auto"),
    errno.EDQUOT: ("The disk quota is used up.", "delete what is not needed, then continue the run with resume=auto"),
    errno.EFBIG: (
        "A file has reached the largest allowed size.",
        "raise the limit in the shell that starts Anytron: ulimit -f unlimited",
    ),
    errno.EMFILE: (
        "This process has no file descriptors left.",
        "raise the limit in the shell that starts Anytron: ulimit -n 4096",
    ),
    errno.ENFILE: (
        "The machine has no file descriptors left.",
        "end programs that hold many files open, or raise the limit as root: sysctl -w fs.file-max=NUMBER",
    ),
    errno.EIO: (
        "A disk has failed.",
        "read the kernel's log (dmesg); copy trainer.output_dir to another disk, and continue there with resume=auto",
    ),
    errno.ESTALE: (
        "A file system has lost a file.",
        "mount the file system again, then continue the run with resume=auto",
    ),
}
_RUST = re.compile(r"\(os error (\d+)\)")
_WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[TextIO]:
    """Write a new version of a text file: it appears as a whole when the ``with`` block ends without error.

    A symbolic link at ``path`` is replaced, not followed. Characters that UTF-8 cannot hold are escaped as in JSON.

    Args:
        path: The file.
        mode: Permissions of the new version, from which the process's umask is subtracted.
    """
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)  # of a process that was killed
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_durably(path: Path, text: str, mode: int = 0o666) -> None:
    """Write ``text`` as the new version of a file, as :func:`replacing` does."""
    with replacing(path, mode) as file:
        file.write(text)


def open_to_append(path: Path) -> int:
    """Open or create a file for appending and return its descriptor; a symbolic link is an error."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def publish_directory(path: Path, write: Callable[[Path], None]) -> None:
    """Write a directory under a new random name, and rename it when it is complete and on disk.

    The random name keeps out a process that is still writing an earlier version of the directory.

    Args:
        path: Final path of the directory; an existing directory is replaced.
        write: Function that fills the empty directory that it is passed.
    """
    part, old = (path.with_name(f".{path.name}.{suffix}") for suffix in ("part", "old"))
    discard(part)
    begun = part / secrets.token_hex(8)
    begun.mkdir(parents=True)
    write(begun)
    for file in begun.rglob("*"):
        # safetensors makes its files private; they get the rights that the umask allows, as all others have.
        file.chmod((0o777 if file.is_dir() else 0o666) & ~_umask())
        sync(file)
    sync(begun)
    remove(old)
    if os.path.lexists(path):
        path.rename(old)
    begun.rename(path)
    sync(path.parent)
    discard(part)
    remove(old)


def discard(path: Path) -> None:
    """Delete a directory, if it exists, even while a process of an earlier start still writes into its subdirectories.

    The subdirectories are renamed first, so that the other process no longer finds them: a file that it adds during the
    deletion would make the deletion fail.
    """
    if path.is_dir() and not path.is_symlink():
        for one in path.iterdir():
            if one.is_dir():
                one.rename(path / secrets.token_hex(8))
    remove(path)


def remove(path: Path) -> None:
    """Delete a file or directory if it exists; a link is deleted, not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file's content, or a directory's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exhausted(error: BaseException, where: str = "") -> ResourceError | None:
    """Explain an error that a used-up resource or a failing disk has caused; return None for any other error.

    Args:
        error: The error, which may come from a library that is not written in Python.
        where: File or place for the explanation; empty = the file that the error names.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number is None and not isinstance(error, AnytronError):  # libraries in other languages have errors of their own
        text = str(error)
        by_number = [int(found) for found in _RUST.findall(text)]
        in_words = [one for one in _EXHAUSTED if os.strerror(one) in text]
        number = next(iter(by_number), max(in_words, key=_length_of_words, default=None))
    if number is None and isinstance(error, FileNotFoundError):  # safetensors says so of all that it cannot open
        number = _why_nothing_opens()
    if number not in _EXHAUSTED:
        return None
    what, fix = _EXHAUSTED[number]
    file = getattr(error, "filename", None)
    return ResourceError(what, where=where or str(file or ""), why=str(error), fix=fix)


def _length_of_words(number: int) -> int:
    """The longest match counts: "Too many open files" also begins "Too many open files in system"."""
    return len(os.strerror(number))


def _why_nothing_opens() -> int | None:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno
    return None


class Lock:
    """A file lock that is released when this process ends, however it ends.

    Args:
        path: The lock file. It is never deleted, and names the process that holds the lock or held it last.

    Raises:
        LockedError: Another process holds the lock.
        OSError: The file cannot be opened.

    Attributes:
        effective: False if the file system has no locks, so that the lock cannot keep a second process away.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE)
        self.effective = True
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(self._descriptor, 200).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise LockedError(owner or "an unknown process") from None
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                os.close(self._descriptor)
                raise
            self.effective = False
        if why := self.lost():  # removed between the two calls: another process may make one anew and lock that
            os.close(self._descriptor)
            raise FileNotFoundError(errno.ENOENT, why, str(path))
        os.truncate(self._descriptor, 0)
        os.write(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    def lost(self) -> str:
        """Return why the lock no longer keeps other processes away; an empty string while it does."""
        return why_lost(self._path, self._descriptor)

    def release(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)


def why_lost(path: Path, descriptor: int) -> str:
    """Return why a path no longer leads to the file that was opened there.

    Args:
        path: Path at which the file was opened.
        descriptor: Descriptor of the open file or directory.

    Returns:
        The cause, in words; empty if the path still leads to the file.
    """
    try:
        own, found = os.fstat(descriptor), path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return f"{path} is not there any more"
    except OSError as error:
        return f"{path} cannot be examined any more: {error}"
    return "" if os.path.samestat(own, found) else f"{path} was replaced"


def lock_owner(path: Path) -> str | None:
    """Return which process holds a :class:`Lock`; None if no process does, or if there is no file. Takes no lock.

    Raises:
        OSError: The file cannot be opened, or the file system has no locks.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.read(descriptor, 200).decode(errors="replace").strip() or "an unknown process"
    finally:
        os.close(descriptor)
    return None


class LockedError(Exception):
    """Another process has the lock; the message says which."""


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


WEIGHTS = "anytron-weights-"
"""Beginning of the name of the directory through which weights go to the rollout engines."""
LOCK = "lock"


class PrivateDirectory:
    """A directory in ``TMPDIR`` that only this user can read. A context manager: leaving deletes it.

    A killed process leaves its directory behind. It is deleted when a process of the same user on this machine next
    makes a directory with the same prefix. A directory whose lock is held belongs to a living process, and stays.

    Args:
        prefix: Beginning of the directory's name.

    Attributes:
        path: Path of the directory.
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
        """Delete the directory with all its content."""
        remove(self.path)
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.delete()


def _delete_stale(path: Path) -> None:
    """Delete the directory of a process of this user that ended without deleting it."""
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
