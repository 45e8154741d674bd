"""Groups of worker processes, real ones that go through the real bootstrap."""

import pytest

from anytron.config.schema import RunConfig
from anytron.device.loading import open_session
from anytron.workers.executor.local import LocalExecutor
from anytron.workers.executor.protocol import GroupSpec


def small_config(output, engine_options, executor, **parallel) -> RunConfig:
    """A run of nothing but processes: there is no model, and there are no data."""
    return RunConfig.model_validate(
        {
            "model": {"config": {"model_type": "none"}, "tokenizer": "none"},
            "data": {"source": "none"},
            "rewards": [{"function": "none"}],
            "engine": {"options": engine_options or {}},
            "executor": executor,
            "parallel": parallel,
            "trainer": {"total_steps": 7, "output_dir": str(output)},
        }
    )


@pytest.fixture
def make_executor(testchip, tmp_path):
    """Make executors; keyword arguments are keys of the ``executor`` section."""
    made = []

    def make(engine_options=None, **settings):
        config = small_config(tmp_path / "run", engine_options, settings)
        executor = LocalExecutor(config, open_session(platform="testchip"))
        made.append(executor)
        return executor

    yield make
    for executor in made:
        executor.close()


@pytest.fixture
def start(make_executor):
    """Start a group of small engines."""

    def start(ranks=1, engine="small", **settings):
        return make_executor(**settings).start(GroupSpec("trainer", "anytron.training_engines", engine, ranks, 1))

    return start
