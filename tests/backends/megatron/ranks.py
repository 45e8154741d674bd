"""Real ranks of the Megatron engine that stay: engine after engine is built in the same processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytron.config.schema import RunConfig
from anytron.executor.local import LocalExecutor
from anytron.plugins import open_session
from anytron.trainer.workers import TrainingWorkers

if TYPE_CHECKING:
    from pathlib import Path

    from anytron.executor.group import LocalWorkerGroup

DEFAULTS: dict[str, dict[str, Any]] = {
    "data": {"source": "unused"},
    "optimizer": {"name": "sgd", "lr": 0.5},
    "engine": {"max_tokens_per_micro_batch": 24, "distributed_optimizer": False},
    "platform": {"name": "cpu"},
}


def engine_config(directory: Path, output: Path, /, **sections: dict[str, Any]) -> RunConfig:
    """A run of nothing but a training engine in float32 with plain SGD, unless ``sections`` say otherwise."""
    known = {
        **DEFAULTS,
        "model": {"path": str(directory), "dtype": "float32"},
        "trainer": {"output_dir": str(output)},
    }
    merged = {name: {**known.get(name, {}), **sections.get(name, {})} for name in {**known, **sections}}
    return RunConfig.model_validate({**merged, "rewards": [{"function": "unused"}]})


class Ranks:
    """Groups of processes, one for each number of ranks, started when first needed.

    Args:
        output: Where logs go.
    """

    def __init__(self, output: Path) -> None:
        self._output = output
        self._session = open_session(platform="cpu", options={})
        self._running: dict[int, tuple[LocalExecutor, LocalWorkerGroup]] = {}

    def engine(self, directory: Path, /, **sections: dict[str, Any]) -> tuple[TrainingWorkers, RunConfig]:
        """Build an engine; the one before, of as many ranks, is closed."""
        config = engine_config(directory, self._output, **sections)
        size = config.parallel.world_size
        if size in self._running and not self._running[size][1].ended:
            group = self._running[size][1]
            group.rebuild(config)
        else:  # the first engine of this size, or a test's failure has ended the processes
            executor = LocalExecutor(config, self._session)
            group = executor.start("trainer", "anytron.training_engines", "megatron", size, num_threads=1)
            self._running[size] = executor, group
        return TrainingWorkers.of(group), config

    def close(self) -> None:
        """End all processes."""
        for executor, _ in self._running.values():
            executor.close()
