"""``run.json``: the file that marks the directory of a run of Anytron, and holds the run's history."""

from __future__ import annotations

import contextlib
import platform as machine
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from anytron.base.components import ROLLOUT_ENGINES, TRAINING_ENGINES, engine_info
from anytron.base.errors import ConfigError
from anytron.base.files import PRIVATE, write_durably
from anytron.config.json_files import WITH_CONFIGURATION, read_object
from anytron.task.data.beginning import Beginning  # noqa: TC001 - pydantic reads the annotation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from anytron.config.schema import RunConfig


RECORD = "run.json"


class Change(BaseModel):
    """A key of the configuration whose value differs from that of an earlier start or of a checkpoint."""

    model_config = ConfigDict(frozen=True)

    key: str
    """Dotted name of the key."""
    old: Any
    """Value before."""
    new: Any
    """Value now."""

    def __str__(self) -> str:
        return f"{self.key} was {self.old!r} and is {self.new!r}"


class Resume(BaseModel):
    """One continuation of the run."""

    model_config = ConfigDict(frozen=True)

    step: int
    """Number of completed steps of the checkpoint from which the run continued."""
    changes: list[Change] = Field(default_factory=list)
    """What was changed in the configuration."""


class RunRecord(BaseModel):
    """The content of ``run.json``: how the run was started, resumed and ended."""

    config: dict[str, Any]
    """The run's current configuration, as JSON values."""
    started_from: str | None = None
    """The checkpoint of another run that this run began with (``resume=PATH``); null if it began without one."""
    beginning: Beginning | None = None
    """Time at which the run began, and its chat template; null in records of older versions."""
    resumes: list[Resume] = Field(default_factory=list)
    """Continuations of the run, oldest first."""
    finished_step: int | None = None
    """Number of completed steps of the trained model in the directory; null until the model is saved."""
    failure: str | None = None
    """The error that ended the run's last process; null while a process goes on, or if it ended without an error."""
    early_stop: str | None = None
    """Why validation ended the run before its last step; null if it did not."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Versions of Python, Anytron and the libraries of the run's engines, in the process that drives the run."""

    def write(self, directory: Path) -> None:
        """Write ``run.json``, readable by its owner only, because configurations may hold secrets."""
        write_durably(directory / RECORD, self.model_dump_json(indent=1) + "\n", PRIVATE)

    @classmethod
    def read(cls, directory: Path) -> RunRecord | None:
        """Read a directory's record; None if no run has written into it.

        Raises:
            ConfigError: The record is damaged.
        """
        path = directory / RECORD
        if not path.is_file() or path.is_symlink():
            return None
        try:
            return cls.model_validate(read_object(path, deepest=WITH_CONFIGURATION))
        except (OSError, ValueError) as error:
            raise ConfigError(
                "The record of the run in the output directory cannot be read.",
                where=str(path),
                why=str(error),
                fix="set another trainer.output_dir",
            ) from error


RECORDED = ("anytron", "torch", "transformers")
"""Distributions whose versions each run records, whatever its engines."""


def installed_versions(config: RunConfig) -> dict[str, str]:
    """Return the versions of Python, of the libraries of every run, and of the components of a run's engines.

    These are the versions of this process. A rollout engine that runs in another Python (``rollout.python``) reports
    its own versions in ``patches.json``.
    Packages that are not installed are left out.
    """
    found = {"python": machine.python_version()}
    for distribution in dict.fromkeys(_distributions(config)):
        with contextlib.suppress(PackageNotFoundError):
            found[distribution] = version(distribution)
    return found


def _distributions(config: RunConfig) -> Iterator[str]:
    yield from RECORDED
    engines = [(TRAINING_ENGINES, config.engine.name, "engine.name")]
    if config.rollout.python is None:
        engines.append((ROLLOUT_ENGINES, config.rollout.engine, "rollout.engine"))
    for group, name, key in engines:
        yield from (component.distribution for component in engine_info(group, name, key).components)
