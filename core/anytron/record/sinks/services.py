"""The services that metrics can go to: MLflow, SwanLab, TensorBoard and Weights & Biases."""

from __future__ import annotations

import math
import re
import secrets
import time
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from anytron.config.section import Section
from anytron.record.sinks.contract import MetricSink

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron.record.sinks.contract import SinkRun


MLFLOW_METRICS, MLFLOW_NAME, MLFLOW_VALUE, MLFLOW_PARAMETERS = 1000, 250, 6000, 100
"""Limits of MLflow (its utils/validation.py): metrics per request, characters of a name, characters of a parameter's
value, parameters per request."""


class MlflowOptions(Section):
    """Options of the sink ``mlflow``."""

    tracking_uri: str | None = None
    """Server or database, for example ``http://HOST:5000``; default: the environment variable ``MLFLOW_TRACKING_URI``
    or, if it is not set, a database in the run's directory, which ``mlflow ui --backend-store-uri`` can show."""
    experiment: str = "anytron"
    """Name of the experiment, which is created if it does not exist."""
    name: str | None = None
    """Name of the run; default: the name of its directory."""


class MlflowSink(MetricSink):
    """Logs to an MLflow run, whose id is saved in the run's directory: a resumed run continues the same MLflow run.

    For a repeated step, MLflow keeps all values and shows the last.
    """

    packages = ("mlflow",)
    install = "pip install 'anytron[mlflow]'"
    options_model = MlflowOptions

    def __init__(self, run: SinkRun, options: MlflowOptions) -> None:
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric = Metric
        own = f"sqlite:///{run.directory}/mlflow.db"
        uri = options.tracking_uri or (mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else own)
        # A client, not mlflow.start_run(): the process has one active run, and that is its user's.
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        known = run.directory / "run_id"
        if known.is_file():
            self._id = known.read_text(encoding="utf-8").strip()
        else:
            found = self._client.get_experiment_by_name(options.experiment)
            experiment = found.experiment_id if found else self._client.create_experiment(options.experiment)
            self._id = self._client.create_run(experiment, run_name=options.name or run.name).info.run_id
            known.write_text(self._id, encoding="utf-8")
            parameters = [
                Param(name[:MLFLOW_NAME], text[:MLFLOW_VALUE]) for name, text in _mlflow_parameters("", run.config)
            ]
            for begin in range(0, len(parameters), MLFLOW_PARAMETERS):
                self._client.log_batch(self._id, params=parameters[begin : begin + MLFLOW_PARAMETERS])
        self._client.update_run(self._id, status="RUNNING")
        self.place = uri

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step, in requests of limited size."""
        now = int(time.time() * 1000)
        found = [self._metric(mlflow_name(name), value, now, step) for name, value in metrics.items()]
        for begin in range(0, len(found), MLFLOW_METRICS):
            self._client.log_batch(self._id, metrics=found[begin : begin + MLFLOW_METRICS])

    write_validation = write

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)


def mlflow_name(name: str) -> str:
    """Replace what MLflow refuses in a name: characters that it does not allow, and path parts such as ``..``."""
    parts = re.sub(r"[^\w.\- :/]", "_", name)[:MLFLOW_NAME].split("/")
    return "/".join("_" if part.strip(".") == "" else part for part in parts)


def _mlflow_parameters(key: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from _mlflow_parameters(f"{key}.{mlflow_name(str(name))}" if key else str(name), part)
    else:
        yield key, str(value)


class SwanLabOptions(Section):
    """Options of the sink ``swanlab``. Set the API key with ``swanlab login`` or ``SWANLAB_API_KEY``."""

    project: str = "anytron"
    """Name of the project."""
    workspace: str | None = None
    """User or organisation; default: the user of the API key."""
    name: str | None = None
    """Name of the experiment; default: the name of the run's directory."""
    tags: list[str] = Field(default_factory=list)
    """Tags of the experiment."""
    mode: Literal["online", "local", "offline"] = "online"
    """``local`` writes files for ``swanlab watch``; ``offline`` writes files that ``swanlab sync`` sends later."""


class SwanLabSink(MetricSink):
    """Logs to a SwanLab experiment; with ``mode: online``, a resumed run continues the same experiment."""

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
        """Log the finite numbers of a step; SwanLab accepts no others."""
        self._run.log({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    write_validation = write

    def close(self) -> None:
        """Wait until everything has been sent."""
        self._run.finish()


class TensorBoardSink(MetricSink):
    """Writes scalars that ``tensorboard --logdir runs`` shows; each step is flushed to disk when it is written.

    In a resumed run, the earlier values of repeated steps are hidden (``purge_step``).
    """

    packages = ("tensorboard",)
    install = "pip install 'anytron[tensorboard]'"

    def __init__(self, run: SinkRun, options: None) -> None:
        del options
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.directory), purge_step=None if run.after is None else run.after + 1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a scalar for each metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    write_validation = write

    def close(self) -> None:
        """End the event file."""
        self._writer.close()


class WandbOptions(Section):
    """Options of the sink ``wandb``. Set the API key with ``wandb login`` or ``WANDB_API_KEY``."""

    project: str = "anytron"
    """Name of the project."""
    entity: str | None = None
    """User or team; default: the default entity of your account."""
    name: str | None = None
    """Name of the run; default: the name of its directory."""
    group: str | None = None
    """Name of the group of runs that the run belongs to."""
    tags: list[str] = Field(default_factory=list)
    """Tags of the run."""
    mode: Literal["online", "offline"] = "online"
    """``offline`` writes files that ``wandb sync`` sends later."""


class WandbSink(MetricSink):
    """Logs to a W&B run, whose id is saved in the run's directory: a resumed run continues the same W&B run.

    The x axis is the metric ``step``, because W&B's own step counter rejects repeated steps.
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
        """Log the metrics as one row; the metric ``step`` is among them."""
        del step
        self._run.log(dict(metrics))

    write_validation = write

    def close(self) -> None:
        """Wait until everything has been sent."""
        self._run.finish()
