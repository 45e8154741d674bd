"""Read a run's directory from another process."""

from __future__ import annotations

import math
import os
import re
import socket
import weakref
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any

from anytron.base.errors import ConfigError, LostDirectoryError
from anytron.base.files import lock_owner, why_lost
from anytron.config.json_files import read_object
from anytron.record.report.history import History, Series, Tail
from anytron.record.tracking.claim import LOCK, LOSSES, PROFILE
from anytron.record.tracking.lines import backwards
from anytron.record.tracking.record import RECORD, RunRecord

METRICS, VALIDATION = "metrics.jsonl", "validation.jsonl"
SAMPLES, WORKERS = "samples.jsonl", "patches.json"
DRIVER_LOG = Path("logs", "driver.log")
TIME, REST = "time/", "time/step_s"


_STAGE = re.compile(r"(\d+)-.+")
"""Name of a stage's directory, inside the directory of a run with several stages."""


def runs_in(path: Path) -> list[Path]:
    """Return the directories of the runs in a directory: the directory itself, or its stages in order.

    Args:
        path: Directory that the user gave. If neither this directory nor a stage in it is a run, this directory is
            returned, and :class:`Run` refuses it.
    """
    if _is_run(path) or not path.is_dir():
        return [path]
    numbered = ((_STAGE.fullmatch(inner.name), inner) for inner in path.iterdir())
    stages = sorted((int(match[1]), inner) for match, inner in numbered if match is not None and _is_run(inner))
    return [inner for _, inner in stages] or [path]


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in (RECORD, METRICS))


class State(Enum):
    """State of a run; the value is the text that users see."""

    GOING = "going on"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped before its last step"
    UNKNOWN = "it is not known whether it goes on"


class Run:
    """A run, read from its files: :meth:`update` reads what has been written since the last call.

    Args:
        path: The run's directory.

    Attributes:
        path: The run's directory, as an absolute path.
        history: Metrics of the run's steps.
        validation: Metrics of the run's validations.
        record: The run's configuration and history; None if they cannot be read.
        owner: Description of the process that writes into the directory now; None = no process.
        problems: Descriptions of files that cannot be read.

    Raises:
        ConfigError: ``path`` is not a run's directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        if not _is_run(self.path):
            raise ConfigError(
                "This is not the directory of a run.",
                where=str(path),
                why=f"it has neither {RECORD} nor {METRICS}" if path.is_dir() else "the directory does not exist",
                fix="give the trainer.output_dir of a run",
            )
        # Held open, so that no other directory can have its identity.
        self._directory = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._directory)
        self.history, self.validation = History(), History()
        self.record: RunRecord | None = None
        self.owner: str | None = None
        self.problems: list[str] = []
        self._read = {
            name: (Tail(self.path / name), history)
            for name, history in ((METRICS, self.history), (VALIDATION, self.validation))
        }
        self.update()

    def update(self) -> None:
        """Read what the run has written since the last call.

        Raises:
            LostDirectoryError: The directory was removed, moved or replaced.
        """
        if why := why_lost(self.path, self._directory):
            raise LostDirectoryError(
                "The directory of the run was removed or replaced.",
                where=str(self.path),
                why=why,
                fix=f"if the run continued, its state was saved next to it: look for {self.path.name}.rescued-*",
            )
        self.problems = []
        try:
            self.owner, self._hidden = lock_owner(self.path / LOCK), False
        except OSError as error:
            self.problems.append(f"{LOCK} cannot be read: {error}")
            self.owner, self._hidden = None, True
        self.record = self._found(RECORD, lambda path: RunRecord.read(path.parent))
        for name, (tail, history) in self._read.items():
            stepless = 0
            for record in tail.read():
                if record is None:
                    history.clear()
                else:
                    stepless += not history.add(record)
            self.count_unreadable(name, tail.broken + stepless, cut_short=tail.cut_short)

    @property
    def state(self) -> State:
        """Whether the run goes on, and if not, how it ended."""
        if self.owner is not None:
            return State.GOING
        finished = None if self.record is None else self.record.finished_step
        if finished is not None and (finished >= (self.total_steps or 0) or self.early_stop is not None):
            return State.FINISHED
        if self._hidden:
            return State.UNKNOWN
        return State.STOPPED if self.failure is None else State.FAILED

    @property
    def failure(self) -> str | None:
        """The error that ended the run; None if there is none, or the run goes on."""
        return None if self.record is None or self.owner is not None else self.record.failure

    @property
    def early_stop(self) -> str | None:
        """Why validation ended the run before its last step; None if the run was not ended early."""
        return None if self.record is None else self.record.early_stop

    @property
    def series(self) -> dict[str, Series]:
        """All metrics over steps, including those of validations, by name."""
        return {**self.history.series, **self.validation.series}

    @property
    def is_over(self) -> bool:
        """Whether the run is over for good, and not just restarting after the loss of a process."""
        if self.state in (State.GOING, State.UNKNOWN):
            return False
        return self.state is State.FINISHED or not self._process_is_alive()

    def _process_is_alive(self) -> bool:
        """Whether the last process that wrote here is still there, as far as one can see it from this machine."""
        try:
            said = (self.path / LOCK).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        found = re.fullmatch(r"process (\d+) on (.+)", said.strip())
        return found is not None and found[2] == socket.gethostname() and Path("/proc", found[1]).exists()

    @property
    def total_steps(self) -> int | None:
        """Number of steps that the configuration asks for; None if it is not known."""
        total = self.setting("trainer", "total_steps")
        return total if isinstance(total, int) else None

    def setting(self, *keys: str) -> Any:
        """Return a value of the configuration; None if the key is missing."""
        value: Any = {} if self.record is None else self.record.config
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    @property
    def remaining_seconds(self) -> float | None:
        """Seconds until the last step, estimated from the last twenty steps; None if unknown."""
        seconds = self.history.values(REST)[-20:]
        if self.total_steps is None or not seconds:
            return None
        return max(self.total_steps - self.history.last, 0) * math.fsum(seconds) / len(seconds)

    def seconds_by_part(self, last: int | None = None) -> dict[str, float]:
        """Return the seconds of each part of a step, summed over the ``last`` steps (None = all steps).

        The part ``other`` is the time of these steps that no other part covers.
        """
        parts = {}
        for name in self.history.series:
            if name.startswith(TIME) and name.endswith("_s") and name != REST:
                values = self.history.values(name)
                parts[name[len(TIME) : -len("_s")]] = math.fsum(values[-last:] if last else values)
        whole = self.history.values(REST)
        other = math.fsum(whole[-last:] if last else whole) - math.fsum(parts.values())
        return {**parts, "other": other} if other > 0 else parts

    def losses(self) -> list[dict[str, Any]]:
        """Return the records of processes that died during the run, the oldest first."""
        tail = Tail(self.path / LOSSES)
        found = [record for record in tail.read() if record is not None]
        self.count_unreadable(LOSSES, tail.broken, cut_short=tail.cut_short)
        return found

    def workers(self) -> dict[str, list[dict[str, Any]]]:
        """Return what the workers have reported about themselves in ``patches.json``, by role."""
        roles = self._found(WORKERS, lambda path: read_object(path) if path.is_file() else {})
        try:
            return {str(role): [dict(rank) for rank in ranks] for role, ranks in (roles or {}).items()}
        except (ValueError, TypeError) as error:
            self.problems.append(f"{WORKERS} cannot be read: {error}")
            return {}

    def log(self, most: int | None = None) -> list[str]:
        """Return the lines of the driver's log, which holds warnings: the last ``most`` ones, or all if it is None."""
        path = self.path / DRIVER_LOG
        if not path.is_file():
            return []
        with path.open("rb") as file:
            whole = (line[:-1] for _, line in backwards(file) if line.endswith(b"\n"))
            return [line.decode(errors="replace") for line in islice(whole, most)][::-1]

    def traces(self) -> list[str]:
        """Return the trace files that ``trainer.profile`` has written, relative to the run's directory."""
        return sorted(f"{PROFILE}/{path.name}" for path in (self.path / PROFILE).glob("*.json.gz"))

    def _found(self, name: str, read: Any) -> Any:
        try:
            return read(self.path / name)
        except (OSError, ValueError, ConfigError) as error:
            why = error.why if isinstance(error, ConfigError) else str(error)
            self.problems.append(f"{name} cannot be read: {why}")
            return None

    def count_unreadable(self, name: str, broken: int, *, cut_short: bool) -> None:
        """Add the lines of a file that cannot be read to :attr:`problems`.

        Args:
            name: The file, relative to the run's directory.
            broken: Number of lines that are not records.
            cut_short: Whether the file ends in the middle of a line.
        """
        if broken:
            self.problems.append(f"{name}: {broken} line{'s are' if broken > 1 else ' is'} not readable and left out")
        if cut_short and self.owner is None:
            self.problems.append(f"{name} ends in the middle of a line, which is left out")
