"""Give this process separate views of processes, network and files of the machine (``namespaces(7)``)."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from pathlib import Path

_USERS, _OTHERS = 0x10000000, 0x20000000 | 0x00020000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000
"""``CLONE_NEWUSER``; the flags for processes, mounts, network, IPC, host name and control groups."""
_BIND, _RECURSIVE, _PRIVATE, _NO_SUID, _NO_DEVICES = 0x1000, 0x4000, 0x40000, 0x2, 0x4
_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442
"""Since Linux 5.12."""
_AT_HERE, _AT_RECURSIVE = -100, 0x8000
_READ_ONLY_ATTRIBUTES = 0x1 | 0x2
"""``MOUNT_ATTR_RDONLY`` and ``MOUNT_ATTR_NOSUID``."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_STRANGERS = range(0x70000000, 0x7FFFFFFF)
"""Ids of users and groups that systemd's table (UIDS-GIDS.md) leaves free: more than there can be processes."""

_libc = ctypes.CDLL(None, use_errno=True)


def control(option: int, value: int) -> None:
    """Call ``prctl``.

    Raises:
        OSError: The kernel refuses the call.
    """
    _done(_libc.prctl(option, value, 0, 0, 0), f"prctl {option}")


def enter() -> None:
    """Enter new namespaces; the namespace of processes takes effect for children only.

    Root enters no user namespace; :func:`drop_root` later makes the process run as an unused user. Any other user
    enters a user namespace that contains this user only. The kernel counts threads separately for each user, and since
    Linux 5.14 for each user namespace, so that sandboxes do not share a limit.

    Raises:
        OSError: The kernel or its configuration does not allow it.
    """
    user, group = os.geteuid(), os.getegid()
    _done(_libc.unshare(_OTHERS | (_USERS if user else 0)), "unshare")
    if user:
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")


def replace_files(visible: list[str], limit: int) -> None:
    """Restrict the files that this process sees to these paths, read-only, an empty ``/tmp`` and a few devices.

    Args:
        visible: Absolute paths; missing paths stay missing, and links stay links.
        limit: Size limit in bytes of the new file system, which is in memory.

    Raises:
        OSError: The kernel does not allow it, or is older than 5.12.
    """
    _mount("none", "/", None, _RECURSIVE | _PRIVATE)
    # Opened before the new root hides what lies below its place.
    opened = {path: os.open(path, os.O_PATH) for path in [*visible, *_DEVICES] if os.path.exists(path)}  # noqa: PTH110
    links = {path: os.readlink(path) for path in visible if os.path.islink(path)}  # noqa: PTH114, PTH115
    root = "/tmp"  # noqa: S108 - every machine has it; nothing is written to it
    _mount("anytron", root, "tmpfs", _NO_SUID | _NO_DEVICES, f"size={limit},nr_inodes=4096,mode=755")
    os.chdir(root)
    for path, descriptor in opened.items():
        place = path.lstrip("/")
        if any(path != other and path.startswith(f"{other}/") and other not in links for other in opened):
            continue  # it is there as part of the other
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        if path in links:
            os.symlink(links[path], place)  # noqa: PTH211 - no pathlib for a text
            continue
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):  # noqa: PTH112
            Path(place).mkdir()
        else:
            Path(place).touch()
        _mount(f"/proc/self/fd/{descriptor}", place, None, _BIND | _RECURSIVE)
        if path not in _DEVICES:
            attributes = struct.pack("=QQQQ", _READ_ONLY_ATTRIBUTES, 0, 0, 0)
            done = _libc.syscall(_MOUNT_SETATTR, _AT_HERE, place.encode(), _AT_RECURSIVE, attributes, len(attributes))
            _done(done, f"making {path} read-only")
        os.close(descriptor)
    Path("tmp").mkdir()
    Path("tmp").chmod(0o1777)
    number = _PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"pivot_root is not supported on {os.uname().machine}")
    _done(_libc.syscall(number, b".", b"."), "pivot_root")
    _done(_libc.umount2(b".", _DETACH), "umount of the old root")
    os.chdir("/tmp")  # noqa: S108 - its own


def stranger() -> tuple[int, int]:
    """Choose the ids of a user and a group that own nothing; ``/proc`` must be visible.

    No other living process chooses the same ids, unless this container maps fewer ids than it has processes.
    """
    maps = (Path(f"/proc/self/{one}_map").read_bytes() for one in ("uid", "gid"))
    user, group = (_stranger(os.getpid(), known) for known in maps)
    return user, group


def drop_root(user: int, group: int) -> None:
    """Become another user, if this process is root.

    Args:
        user: The user to become.
        group: The only group that the process then belongs to.

    Raises:
        OSError: The user does not exist in this namespace.
    """
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(group, group, group)
        os.setresuid(user, user, user)


def _stranger(number: int, known: bytes) -> int:
    """Choose an id by a number.

    Args:
        number: Number of a process.
        known: Content of ``uid_map`` or ``gid_map``. A line has the first id here, the first id outside, and the number
            of ids. Containers without privileges have at most 65,536 ids.
    """
    chosen = _STRANGERS[number % len(_STRANGERS)]
    parts = [range(int(first), int(first) + int(count)) for first, _, count in map(bytes.split, known.splitlines())]
    if any(chosen in part for part in parts):
        return chosen
    most = max(parts, key=len)
    return most[-1 - number % max(1, len(most) - 1)]  # never the first, which may be root


def _mount(source: str, place: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = (None if word is None else word.encode() for word in (source, place, kind))
    data = None if options is None else options.encode()
    _done(_libc.mount(*words, ctypes.c_ulong(flags), data), f"mount {place}")


def _done(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
