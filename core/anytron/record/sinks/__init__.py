r"""Where metrics go besides ``metrics.jsonl``: TensorBoard, Weights & Biases, MLflow, SwanLab, or a sink of your own.

A sink is a class. ``tracking.sinks`` names it as ``file.py:Class``, or by the name that an installed distribution
gives it in the entry-point group ``anytron.metric_sinks``::

    from anytron.tasks import MetricSink

    class RewardFile(MetricSink):
        def __init__(self, run, options):
            self._file = (run.directory / "reward.txt").open("a", buffering=1)

        def write(self, step, metrics):
            self._file.write(f"{step} {metrics['reward/mean']}\n")

        def close(self):
            self._file.close()

If a sink raises, hangs or is slow, the run goes on (:mod:`anytron.record.sinks.delivery`).
"""

from anytron.record.sinks.contract import MetricSink, SinkRun

__all__ = ["MetricSink", "SinkRun"]
