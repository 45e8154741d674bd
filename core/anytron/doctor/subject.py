"""What is examined: this machine, and the run that a configuration describes, if one is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anytron.components import ROLLOUT_ENGINES, TRAINING_ENGINES, EngineInfo, component_names, engine_info
from anytron.config.generation import RolloutSection
from anytron.config.load import read_config
from anytron.config.running import ExecutorSection
from anytron.config.schema import EngineSection
from anytron.errors import AnytronError
from anytron.plugins import open_session

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from anytron.config.schema import RunConfig
    from anytron.plugins import Session


@dataclass(frozen=True)
class Subject:
    """What is examined.

    Attributes:
        path: The YAML file; None = no run in particular, and the default engines.
        overrides: Keys set on the command line.
        run: The configuration as it was read, without the edits of plugins; None without a file, or if it is invalid.
        session: The plugins and the active platform; None if there is none.
        broken: Why there is no session.
        misread: Why the file is no configuration.
    """

    path: Path | None
    overrides: tuple[str, ...]
    run: RunConfig | None = None
    session: Session | None = None
    broken: Exception | None = None
    misread: Exception | None = None

    @property
    def engine(self) -> str:
        """Name of the training engine."""
        return EngineSection().name if self.run is None else self.run.engine.name

    @property
    def rollout(self) -> str:
        """Name of the rollout engine."""
        return RolloutSection().engine if self.run is None else self.run.rollout.engine

    @property
    def executor(self) -> str:
        """Name of the executor."""
        return ExecutorSection().kind if self.run is None else self.run.executor.kind

    def engines(self) -> dict[str, EngineInfo]:
        """The descriptions of the engines that are installed, by name; of another environment's rollout too."""
        asked = {self.engine: (TRAINING_ENGINES, "engine.name"), self.rollout: (ROLLOUT_ENGINES, "rollout.engine")}
        return {
            name: engine_info(group, name, key) for name, (group, key) in asked.items() if name in component_names(group)
        }


def look(path: Path | None, overrides: Sequence[str]) -> Subject:
    """Read the configuration and open a session; what does not work is kept as the reason."""
    run, misread = None, None
    if path is not None:
        try:
            run, _ = read_config(path, overrides)
        except AnytronError as error:
            misread = error
    session, broken = None, None
    try:
        section = None if run is None else run.platform
        engine = EngineSection().name if run is None else run.engine.name
        session = open_session(section and section.name, section and section.options, engine)
    except Exception as error:  # noqa: BLE001 - a platform's own code; every topic that needs it says so
        broken = error
    return Subject(path, tuple(overrides), run, session, broken, misread)
