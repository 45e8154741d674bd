"""Who may ask the server what: the server's key, and the keys of sessions."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from shlex import quote
from typing import TYPE_CHECKING

from anytron.base.errors import ConfigError
from anytron.base.files import exhausted
from anytron.serving.refusal import Refusal
from anytron.serving.sessions import Session

if TYPE_CHECKING:
    from pathlib import Path

    from anytron.serving.limits import Limits
    from anytron.serving.sessions import Terms

KEY_VARIABLE = "ANYTRON_SERVE_KEY"
"""Environment variable that holds the server's key."""
SHORTEST = 16
"""Fewest characters of a key."""
LARGEST = 1 << 12
"""Most bytes of a file with a key."""
_KEY = re.compile(r"[!-~]{16,512}")
_NAME = re.compile(r"[\w.:-]{1,128}", re.ASCII)


def new_key() -> str:
    """Return a new key of 256 random bits."""
    return f"anytron-{secrets.token_urlsafe(32)}"


def variable_key() -> str | None:
    """Take the server's key out of the environment, so that processes that start later do not inherit it.

    Returns:
        The key; None = the variable is not set.

    Raises:
        ConfigError: The key cannot be used.
    """
    given = os.environ.pop(KEY_VARIABLE, None)
    fix = f"set a new key: export {KEY_VARIABLE}=$(python -c 'import secrets; print(secrets.token_urlsafe(32))')"
    return None if given is None else check_key(given.strip(), KEY_VARIABLE, fix)


def check_key(key: str, where: str, fix: str) -> str:
    """Check a key that the user has chosen.

    Args:
        key: The key.
        where: The variable or the file that holds it, for the error.
        fix: How to write a new key there, for the error.

    Raises:
        ConfigError: The key is too short, or has a character that HTTP headers cannot have. The error does not show the
            key.
    """
    if not _KEY.fullmatch(key):
        raise ConfigError(
            "The server's key cannot be used.",
            where=where,
            why=f"a key has {SHORTEST} to 512 visible ASCII characters and no spaces",
            fix=fix,
        )
    return key


def read_key(path: Path) -> str:
    """Read the server's key from a file that only this user can read.

    Raises:
        ConfigError: The file cannot be read, belongs to another user, other users have permissions on it, or its key
            cannot be used.
    """
    file = quote(str(path))
    new = f"(umask 077; openssl rand -hex 32 > {file})"
    try:
        status, data = _opened(path)
        key = data.decode("ascii").strip()
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and (known := exhausted(error, str(path))) is not None:
            raise known from error
        why = "it is not ASCII text" if isinstance(error, UnicodeDecodeError) else str(error)
        fix = f"write a new key into the file: {new}"
        raise ConfigError("The file with the server's key cannot be read.", where=str(path), why=why, fix=fix) from None
    if status.st_uid != os.geteuid():
        raise ConfigError(
            "The file with the server's key belongs to another user.",
            where=str(path),
            why=f"its owner is the user {status.st_uid}, and this is the user {os.geteuid()}",
            fix="write a key into a new file: (umask 077; openssl rand -hex 32 > FILE); and name that file with "
            "--key-file or rollout.endpoint.key_file",
        )
    mode = status.st_mode
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            "Other users have permissions on the file with the server's key.",
            where=str(path),
            why=f"its permissions are {stat.S_IMODE(mode):03o}",
            fix=f"make the file private, with a new key: chmod 600 {file} && openssl rand -hex 32 > {file}",
        )
    return check_key(key, str(path), f"write a new key into the file: {new}")


def _opened(path: Path) -> tuple[os.stat_result, bytes]:
    """Read a file and what the kernel says of it: of the open file, because the path may name another one later.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is too large.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError("it is a directory, a pipe or a device")
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise ValueError(f"it has more than {LARGEST} bytes")
    return status, data


class Keyring:
    """The server's key, and the sessions with their keys. Only digests of keys are kept.

    Args:
        key: The server's key.
        limits: Limits of sessions.
    """

    def __init__(self, key: str, limits: Limits) -> None:
        self._key, self._limits = _digest(key), limits
        self._sessions: dict[str, Session] = {}
        self._names: dict[bytes, str] = {}

    def admit(self, authorization: str | None) -> Session | None:
        """Check the header ``Authorization``.

        Returns:
            The session of the key; None = it is the server's key.

        Raises:
            Refusal: There is no key, or it is wrong.
        """
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip()) if scheme.lower() == "bearer" else b""
        if hmac.compare_digest(digest, self._key):
            return None
        session = self._sessions.get(self._names.get(digest, ""))
        if session is None:
            raise Refusal(401, "invalid_api_key", "The key is missing or wrong: send 'Authorization: Bearer KEY'.")
        return session

    def require_server_key(self, session: Session | None) -> None:
        """Refuse a session's key where the server's is needed.

        Raises:
            Refusal: The request came with the key of a session.
        """
        if session is not None:
            raise Refusal(403, "not_allowed", "A session's key cannot do this; use the server's key.")

    def begin(self, terms: Terms | None = None) -> tuple[Session, str]:
        """Begin a session; return it and its key.

        Args:
            terms: What a run requires of the session; None = no run trains on it.

        Raises:
            Refusal: There are too many sessions, and no run trains on this one.
        """
        key = new_key()
        name = secrets.token_hex(12)
        if terms is None:
            session = self.named(name)
        else:  # however many sessions clients have begun
            session = self._sessions[name] = Session(name, terms)
        self._names[_digest(key)] = session.id
        return session, key

    def named(self, name: str) -> Session:
        """Return the session of a name; begin it if there is none. It has no key.

        Raises:
            Refusal: The name cannot be used, or there are too many sessions.
        """
        if not _NAME.fullmatch(name):
            why = "a name has 1 to 128 characters: letters, digits and _ . : -"
            raise Refusal(400, "invalid_session", f"The name of the session cannot be used: {why}.", "X-Session-ID")
        if name not in self._sessions:
            if len(self._sessions) >= self._limits.sessions:
                most = f"the server keeps {self._limits.sessions} sessions"
                raise Refusal(429, "too_many_sessions", f"There are too many sessions: {most}; delete some.")
            self._sessions[name] = Session(name)
        return self._sessions[name]

    def visible(self, name: str, session: Session | None) -> Session:
        """Return the session of a name, if the sender of the request may read it.

        Raises:
            Refusal: There is no such session, or the request came with the key of another one.
        """
        found = self._sessions.get(name)
        if found is None or (session is not None and session is not found):
            raise Refusal(404, "no_session", "There is no session of this name.")
        return found

    def delete(self, session: Session) -> None:
        """Forget a session, its key and what it has recorded."""
        session.ended = True
        self._sessions.pop(session.id, None)
        self._names = {digest: name for digest, name in self._names.items() if name != session.id}

    def recorded(self) -> int:
        """Return the bytes that sessions have recorded, without those of a run."""
        return sum(session.recorded for session in self._sessions.values() if session.terms is None)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
