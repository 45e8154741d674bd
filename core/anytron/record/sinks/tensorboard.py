"""TensorBoard: event files in the run's own directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.record.sinks.contract import MetricSink

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anytron.record.sinks.contract import SinkRun


class TensorBoardSink(MetricSink):
    """Writes scalars that ``tensorboard --logdir runs`` shows, each step on disk as soon as it is taken.

    A run that continues hides the steps that it repeats (``purge_step``).
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
