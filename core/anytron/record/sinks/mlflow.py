"""MLflow."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from anytron.config.section import Section
from anytron.record.sinks.contract import MetricSink

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron.record.sinks.contract import SinkRun

BATCH, NAME, VALUE, PARAMETERS = 1000, 250, 6000, 100
"""What MLflow takes (its utils/validation.py): metrics of a request, characters of a name and of a parameter's value,
parameters of a request."""


class MlflowOptions(Section):
    """Options of the sink ``mlflow``."""

    tracking_uri: str | None = None
    """Server or database, for example ``http://HOST:5000``; default: ``MLFLOW_TRACKING_URI``, and without that
    a database in the run's directory, for ``mlflow ui --backend-store-uri``."""
    experiment: str = "anytron"
    """Experiment; it is made if it does not exist."""
    name: str | None = None
    """Name of the run; default: that of its directory."""


class MlflowSink(MetricSink):
    """Logs to a run of MLflow, whose id is kept in the run's directory: a run that continues is the same one there.

    MLflow keeps every value of a step that is repeated, and shows the last.
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
            parameters = [Param(name[:NAME], text[:VALUE]) for name, text in _flat("", run.config)]
            for begin in range(0, len(parameters), PARAMETERS):
                self._client.log_batch(self._id, params=parameters[begin : begin + PARAMETERS])
        self._client.update_run(self._id, status="RUNNING")
        self.place = uri

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a batch."""
        now = int(time.time() * 1000)
        found = [self._metric(valid_name(name), value, now, step) for name, value in metrics.items()]
        for begin in range(0, len(found), BATCH):
            self._client.log_batch(self._id, metrics=found[begin : begin + BATCH])

    write_validation = write

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)


def valid_name(name: str) -> str:
    """Write a name with the characters that MLflow takes: no others, and no path that is not a plain one."""
    parts = re.sub(r"[^\w.\- :/]", "_", name)[:NAME].split("/")
    return "/".join("_" if part.strip(".") == "" else part for part in parts)


def _flat(key: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from _flat(f"{key}.{valid_name(str(name))}" if key else str(name), part)
    else:
        yield key, str(value)
