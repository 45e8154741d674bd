"""What is examined: this machine, and the run that a configuration describes, if one is given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from anytron.base.components import ROLLOUT_ENGINES, TRAINING_ENGINES, EngineInfo, component_names, engine_info
from anytron.config.generation import RolloutSection
from anytron.config.load import read_config
from anytron.config.running import EngineSection, ExecutorSection
from anytron.device.loading import open_session
from anytron.proof.checks import Inapplicable
from anytron.run.preflight.open_run import open_run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from anytron.config.diagnostics import Diagnostic
    from anytron.config.schema import RunConfig
    from anytron.device.loading import Session


@dataclass(frozen=True)
class Subject:
    """The machine and the run that are examined.

    Attributes:
        path: The YAML file; None = no particular run: the default engines are examined.
        overrides: Keys set on the command line.
        run: The run's configuration. If the run could be opened, it has the edits of plugins; otherwise it is as it was
            read. None without a file, or if the file is not a valid configuration.
        session: The plugins and the active platform; None if they could not be loaded.
        broken: The error that prevented a session; None if there is a session.
        misread: The error because of which the file cannot be read or the run cannot be opened; None if there was none.
        diagnostics: Problems that a run would report; None if the run could not be opened.
    """

    path: Path | None
    overrides: tuple[str, ...]
    run: RunConfig | None = None
    session: Session | None = None
    broken: Exception | None = None
    misread: Exception | None = None
    diagnostics: tuple[Diagnostic, ...] | None = None

    @property
    def opened(self) -> Session:
        """The session, for callers that cannot do without it.

        Raises:
            Inapplicable: No session could be opened.
        """
        if self.session is None:
            raise Inapplicable("no platform is active")
        return self.session

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
        """Descriptions of the run's engines, by name; engines that no installed distribution offers are missing."""
        asked = {self.engine: (TRAINING_ENGINES, "engine.name"), self.rollout: (ROLLOUT_ENGINES, "rollout.engine")}
        return {
            name: engine_info(group, name, key)
            for name, (group, key) in asked.items()
            if name in component_names(group)
        }


def look(path: Path | None, overrides: Sequence[str]) -> Subject:
    """Open the run as ``anytron train`` does, or at least read the configuration and open a session.

    Errors do not stop this: they are kept in the returned subject (``broken`` and ``misread``).
    """
    subject, run = Subject(path, tuple(overrides)), None
    if path is not None:
        try:
            run, _ = read_config(path, overrides)
            opened = open_run(path, overrides)
            found = tuple(opened.diagnostics)
            return replace(subject, run=opened.config, session=opened.session, diagnostics=found)
        except Exception as error:  # noqa: BLE001 - of plugins too: the topic configuration says it
            subject = replace(subject, run=run, misread=error)
    try:
        if run is None:
            session = open_session(engine=EngineSection().name)
        else:
            session = open_session(run.platform.name, run.platform.options, run.engine.name)
    except Exception as error:  # noqa: BLE001 - a platform's own code; every topic that needs it says so
        return replace(subject, broken=error)
    return replace(subject, session=session)
