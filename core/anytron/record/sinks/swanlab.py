"""SwanLab."""

from __future__ import annotations

import math
import secrets
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from anytron.config.section import Section
from anytron.record.sinks.contract import MetricSink

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anytron.record.sinks.contract import SinkRun


class SwanLabOptions(Section):
    """Options of the sink ``swanlab``. The key is SwanLab's own matter: ``swanlab login``, or ``SWANLAB_API_KEY``."""

    project: str = "anytron"
    """Project."""
    workspace: str | None = None
    """User or organisation; default: the user's."""
    name: str | None = None
    """Name of the experiment; default: that of the run's directory."""
    tags: list[str] = Field(default_factory=list)
    """Tags."""
    mode: Literal["online", "local", "offline"] = "online"
    """``local`` writes files for ``swanlab watch``, ``offline`` ones that ``swanlab sync`` sends later."""


class SwanLabSink(MetricSink):
    """Logs to an experiment of SwanLab; online, a run that continues is the same one there."""

    packages = ("swanlab",)
    install = "pip install 'anytron[swanlab]'"
    options_model = SwanLabOptions

    def __init__(self, run: SinkRun, options: SwanLabOptions) -> None:
        import swanlab

        settings = swanlab.Settings(interactive=False)  # it would ask for a key on the terminal
        same = {"id": run.remembered("run_id", secrets.token_hex(8)), "resume": "allow"}
        self._run = swanlab.init(
            project=options.project,
            workspace=options.workspace,
            name=options.name or run.name,
            tags=options.tags,
            mode=options.mode,
            log_dir=str(run.directory),
            config=dict(run.config),
            settings=settings,
            reinit=True,
            **(same if options.mode == "online" else {}),
        )
        self.place = str(self._run.url if options.mode == "online" else run.directory)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the finite numbers of a step: it has no others."""
        self._run.log({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    write_validation = write

    def close(self) -> None:
        """Wait until everything has been sent."""
        self._run.finish()
