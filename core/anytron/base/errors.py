"""The base of every error that Anytron raises for a person to read."""

from __future__ import annotations

import contextlib
import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class AnytronError(Exception):
    """Base class of Anytron's errors: what failed, where, why, and how to fix it.

    The command line prints these four parts without a traceback; any other exception is a bug of Anytron and keeps its
    traceback.

    Args:
        what: What failed, as a sentence.
        where: The file, key, plugin or process concerned.
        why: The cause.
        fix: The command or setting that solves the problem.
    """

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = "") -> None:
        self.what = what
        self.where = where
        self.why = why
        self.fix = fix
        super().__init__(str(self))

    @property
    def headline(self) -> str:
        """What failed and where, for a place that holds one line: a row of a table, an entry of a report."""
        return f"{self.what} ({self.where})" if self.where else self.what

    @property
    def details(self) -> list[tuple[str, str]]:
        """Names and texts of ``where``, ``why`` and ``fix``, without empty ones; lines after the first are indented."""
        named = (("where", self.where), ("why", self.why), ("fix", self.fix))
        # A cause may be a traceback of a user's code.
        return [(name, text.replace("\n", "\n    ")) for name, text in named if text]

    def __str__(self) -> str:
        return "\n".join([self.what, *(f"  {name}: {text}" for name, text in self.details)])

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only fields do not survive BaseException's default pickling; errors cross processes.
        return (_rebuild, (type(self), self.__dict__.copy()))


def _rebuild(cls: type[AnytronError], state: dict[str, object]) -> AnytronError:
    error = cls.__new__(cls)
    error.__dict__.update(state)
    Exception.__init__(error, str(error))
    return error


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Suggest the known name that is spelled most like a wrong one.

    Args:
        name: The wrong name.
        known: The known names.
        prefix: Text before the known names, for example the section of a key.

    Returns:
        ``did you mean PREFIXNAME?``; empty if no known name is similar.
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {prefix}{near[0]}?" if near else ""


class ConfigError(AnytronError):
    """The configuration names something unknown, impossible or missing."""


class DataError(AnytronError):
    """Prompts, tokens or rewards are not usable."""


@contextlib.contextmanager
def within(part: str) -> Iterator[None]:
    """Put the name of a part (a stage, a validation set) before the place that an error in the block names."""
    try:
        yield
    except (ConfigError, DataError) as error:
        where = part + (f": {error.where}" if error.where else "")
        raise type(error)(error.what, where=where, why=error.why, fix=error.fix) from error


class PluginError(AnytronError):
    """A plugin could not be loaded, registered or chosen."""


class PlatformError(PluginError):
    """A platform is missing or cannot be used, or several can be used and none was chosen."""


class HookContractError(PluginError):
    """A plugin returned a value that the hook does not allow."""


class PatchError(AnytronError):
    """A required patch could not be applied, verified or undone."""


class EngineError(AnytronError):
    """A training or rollout engine cannot do what was asked."""


class TransferError(EngineError):
    """Weights did not arrive as they were sent. Nothing is wrong with the weights: sending them again can help."""


class WorkerError(AnytronError):
    """A worker process failed; ``why`` holds its traceback."""


class ProcessLost(WorkerError):  # noqa: N818 - the name of what happened
    """A worker process died without an error, does not answer, or its machine is gone: a restart can help.

    A rank that raised is not lost: it would raise again.
    """


class CheckpointError(AnytronError):
    """A checkpoint is missing, damaged, or does not belong to the run."""


class LostDirectoryError(AnytronError):
    """A directory that a run writes into was removed, moved or replaced while the run went on."""


class ResourceError(AnytronError):
    """The machine has run out of something (disk space, file descriptors, device memory), or a disk fails."""
