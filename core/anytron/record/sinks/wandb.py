"""Weights & Biases."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from anytron.config.section import Section
from anytron.record.sinks.contract import MetricSink

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anytron.record.sinks.contract import SinkRun


class WandbOptions(Section):
    """Options of the sink ``wandb``. The API key is W&B's own matter: ``wandb login``, or ``WANDB_API_KEY``."""

    project: str = "anytron"
    """Project."""
    entity: str | None = None
    """User or team; default: the user's."""
    name: str | None = None
    """Name of the run; default: that of its directory."""
    group: str | None = None
    """Group of runs."""
    tags: list[str] = Field(default_factory=list)
    """Tags."""
    mode: Literal["online", "offline"] = "online"
    """``offline`` writes files that ``wandb sync`` sends later."""


class WandbSink(MetricSink):
    """Logs to a run of W&B, whose id is kept in the run's directory: a run that continues is the same one there.

    The x axis is the metric ``step``, not W&B's own counter, which refuses steps that are repeated.
    """

    packages = ("wandb",)
    install = "pip install 'anytron[wandb]'"
    options_model = WandbOptions

    def __init__(self, run: SinkRun, options: WandbOptions) -> None:
        import wandb

        self._run = wandb.init(
            project=options.project,
            entity=options.entity,
            name=options.name or run.name,
            group=options.group,
            tags=options.tags,
            mode=options.mode,
            id=run.remembered("run_id", secrets.token_hex(4)),
            resume="allow",
            dir=str(run.directory),
            config=dict(run.config),
            reinit="create_new",
            # It would catch what the driver prints, and print by itself.
            settings=wandb.Settings(console="off", silent=True),
        )
        # W&B hooks into imports to report which packages there are: once its service has died, an import anywhere in
        # this process would raise (0.31, wandb_run.py). It has no setting for that.
        self._run._unregister_telemetry_import_hooks(self._run.id)
        self._run.define_metric("*", step_metric="step")
        offline = options.mode == "offline"
        self.place = f"{run.directory}/wandb, for wandb sync" if offline else str(self._run.url)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a row; ``step`` is in it."""
        del step
        self._run.log(dict(metrics))

    write_validation = write

    def close(self) -> None:
        """Wait until everything has been sent."""
        self._run.finish()
