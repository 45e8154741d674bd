"""Replicas that join and leave while a run goes on, as ``anytron scale`` asks.

The command writes the number of replicas into a file in the run's directory, and the driver reads it before each step::

    anytron scale RUN 4  ->  RUN/replicas.wanted  ->  RolloutPool.resize(4)

The number holds until the run ends, also if its processes start again after one was lost. A run that is resumed begins
with the number in its configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.base.errors import AnytronError, ConfigError
from anytron.base.files import exhausted, remove
from anytron.config.json_files import read_bytes
from anytron.record.tracking.claim import REPLICAS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from anytron.config.schema import RunConfig
    from anytron.run.rollout.pool import RolloutPool
    from anytron.workers.executor.protocol import Executor

LONGEST = 20
"""Most bytes of the file."""


class Scaling:
    """Gives a run as many replicas as it was asked to have.

    Args:
        directory: The run's directory.
        pool: The rollout engines.
        executor: Executor that starts their processes.
        config: The run's configuration, with the number of replicas with which the run has begun.
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
        config: RunConfig,
        tell: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._file, self._pool, self._executor = directory / REPLICAS, pool, executor
        self._tell, self._warn = tell, warn
        self.replicas = self._considered = config.rollout.replicas
        self._most, self._warned = most_replicas(config), ""

    def forget(self) -> None:
        """Remove what an earlier start of the run was asked for."""
        remove(self._file)

    def follow(self) -> bool:
        """Start or end replicas if another number is wanted than before; return whether their number has changed."""
        try:
            wanted = self._wanted()
            if wanted in (None, self._considered):
                return False
            self._considered = wanted
            if wanted == self.replicas:
                return False
            self._executor.require_replicas(wanted)
            self._resize(wanted)
        except AnytronError as error:  # the run has what it needs, and goes on
            if str(error) != self._warned:
                self._warn(f"rollout.replicas stays {self.replicas}: {error.what} {error.why}".rstrip())
            self._warned = str(error)
            return False
        later = ", which generate when their engines are built" if wanted > self.replicas else ""
        self._tell(f"rollout.replicas: {self.replicas} -> {wanted}{later}")
        self.replicas = wanted
        return True

    def _wanted(self) -> int | None:
        """Return the number in the file; None without a file. Raises ConfigError if it is no number of replicas."""
        try:
            text = read_bytes(self._file, LONGEST).decode("utf-8", "replace").strip()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise exhausted(error, str(self._file)) or self._no_number(str(error)) from error
        if not (text.isascii() and text.isdigit() and int(text)):
            raise self._no_number(f"it has {text!r}")
        check_number(int(text), self._most)
        return int(text)

    def _no_number(self, why: str) -> ConfigError:
        fix = f"write the number with: anytron scale {self._file.parent} N"
        return ConfigError(f"The file {REPLICAS} holds no number of replicas.", where=str(self._file), why=why, fix=fix)

    def _resize(self, wanted: int) -> None:
        try:
            self._pool.resize(wanted)
        except AnytronError:
            self._pool.resize(self.replicas)  # some may have started
            raise


def most_replicas(config: RunConfig) -> int:
    """Return how many replicas can have something to do: the responses of a step."""
    return config.data.prompts_per_step * config.rollout.samples_per_prompt


def check_number(count: int, most: int) -> None:
    """Refuse more replicas than a step has responses.

    Raises:
        ConfigError: ``count`` is greater than ``most``.
    """
    if count > most:
        raise ConfigError(
            f"A run has no work for {count} replicas.",
            where=f"rollout.replicas = {count}",
            why=f"a replica needs a response to generate, and a step has {most} "
            "(data.prompts_per_step x rollout.samples_per_prompt)",
            fix=f"set the number of replicas to at most {most}",
        )
