"""Replicas that join and leave while a run goes on, as ``anytron scale`` asks.

The command writes the number of replicas into a file in the run's directory, and the driver reads it before each step::

    anytron scale RUN 4  ->  RUN/replicas.wanted  ->  RolloutPool.resize(4)

The number holds until the run ends, also if its processes start again after one was lost. A run that is resumed begins
with the number in its configuration.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from anytron.base.errors import ConfigError, WorkerError
from anytron.record.tracking.claim import REPLICAS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from anytron.run.rollout.pool import RolloutPool
    from anytron.workers.executor.protocol import Executor


class Scaling:
    """Gives a run as many replicas as it was asked to have.

    Args:
        directory: The run's directory.
        pool: The rollout engines.
        executor: Executor that starts their processes.
        replicas: Number of replicas with which the run has begun.
        tell: Called with a message about each change.
        warn: Called with the reason if the number stays as it is.

    Attributes:
        replicas: The number of replicas.
    """

    def __init__(
        self,
        directory: Path,
        pool: RolloutPool,
        executor: Executor,
        replicas: int,
        tell: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._file, self._pool, self._executor = directory / REPLICAS, pool, executor
        self._tell, self._warn = tell, warn
        self.replicas = self._considered = replicas

    def forget(self) -> None:
        """Remove what an earlier start of the run was asked for."""
        self._file.unlink(missing_ok=True)

    def follow(self) -> bool:
        """Start or end replicas if another number is wanted than before; return whether their number has changed."""
        try:
            text = self._file.read_text(encoding="utf-8", errors="replace")[:20].strip()
        except FileNotFoundError:
            return False
        wanted = int(text) if text.isascii() and text.isdigit() else 0
        if wanted == self._considered:
            return False
        self._considered = wanted
        if wanted < 1:
            self._warn(f"rollout.replicas stays {self.replicas}: {self._file} has {text!r} instead of a number")
        if wanted in (self.replicas, 0):
            return False
        try:
            self._executor.require_replicas(wanted)
            self._resize(wanted)
        except (ConfigError, WorkerError) as error:
            self._warn(f"rollout.replicas stays {self.replicas}: {error.what} {error.why}")
            return False
        later = ", which generate when their engines are built" if wanted > self.replicas else ""
        self._tell(f"rollout.replicas: {self.replicas} -> {wanted}{later}")
        self.replicas = wanted
        return True

    def _resize(self, wanted: int) -> None:
        try:
            self._pool.resize(wanted)
        except (ConfigError, WorkerError):
            with contextlib.suppress(WorkerError):
                self._pool.resize(self.replicas)  # some may have started
            raise
