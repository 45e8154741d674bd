"""Real ranks of the Megatron engine: processes that keep running and build one engine after another."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anytron.config.schema import RunConfig
from anytron.device.loading import open_session
from anytron.run.groups import reward_model_group
from anytron.run.trainer.reward_model import RewardModelRanks
from anytron.run.trainer.workers import TrainingWorkers
from anytron.workers.executor.local import LocalExecutor, LocalWorkerGroup
from anytron.workers.executor.protocol import GroupSpec

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

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
    judge = {"function": "reward_model"} if "reward_model" in sections else {"function": "unused"}
    return RunConfig.model_validate({**merged, "rewards": [judge]})


SET_BY_LIBRARIES = frozenset({"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TORCH_DEVICE_BACKEND_AUTOLOAD"})
"""Variables that pytest, transformers and Anytron set in this process on their own; no test means them to differ."""


@dataclass(frozen=True)
class _Started:
    """Processes, and the environment that they inherited when they started."""

    executor: LocalExecutor
    group: LocalWorkerGroup
    inherited: object


class Ranks:
    """Groups of processes, one for each number of ranks and platform, started when first needed.

    Processes see the plugins and the environment of the moment at which they started. A test that changes
    either (by installing a saboteur) therefore gets processes of its own; they end when a test with another
    change starts as many ranks. The processes of the unchanged environment keep running.

    Args:
        output: Where logs go.
    """

    def __init__(self, output: Path) -> None:
        self._output = output
        self._ordinary = _inherited()
        self._running: dict[tuple[str, int, str, bool], _Started] = {}

    def engine(self, directory: Path, /, **sections: dict[str, Any]) -> tuple[TrainingWorkers, RunConfig]:
        """Build an engine; the one before, of as many ranks, is closed."""
        config = engine_config(directory, self._output, **sections)
        size = config.parallel.world_size
        spec = GroupSpec("trainer", "anytron.training_engines", "megatron", size, num_threads=1, config=config)
        return TrainingWorkers.of(self._built(config, spec)), config

    def reward_model(self, directory: Path, /, **sections: dict[str, Any]) -> tuple[RewardModelRanks, RunConfig]:
        """Build the ranks of a run's reward model, and nothing else of the run."""
        config = engine_config(directory, self._output, **sections)
        return RewardModelRanks.of(self._built(config, reward_model_group(config)), config), config

    def _built(self, config: RunConfig, spec: GroupSpec) -> LocalWorkerGroup:
        assert spec.config is not None
        inherited, platform = _inherited(), config.platform
        key = spec.model, spec.world_size, platform.model_dump_json(), inherited == self._ordinary
        started = self._running.get(key)
        if started is not None and started.inherited == inherited and not started.group.ended:
            started.group.rebuild(spec.config)
        else:
            if started is not None:
                started.executor.close()
            executor = LocalExecutor(config, open_session(platform=platform.name, options=platform.options))
            started = self._running[key] = _Started(executor, executor.start(spec), inherited)
        return started.group

    def close(self) -> None:
        """End all processes."""
        for started in self._running.values():
            started.executor.close()


def _inherited() -> tuple[list[str], dict[str, str]]:
    """What a process that starts now inherits: where it finds plugins, and the environment."""
    return list(sys.path), {name: value for name, value in os.environ.items() if name not in SET_BY_LIBRARIES}


def install_extension(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install an extension, here and in processes that start from now on: the source of a class ``Plugin``."""
    metadata = folder / "installed_plugin-1.0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (folder / "installed_plugin.py").write_text(source)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: installed-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[anytron.plugins]\ninstalled = installed_plugin:Plugin\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))
