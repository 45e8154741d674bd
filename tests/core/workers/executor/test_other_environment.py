"""A rollout process may run in an environment of its own (``rollout.python``)."""

from pathlib import Path

import pytest

from anytron import __version__
from anytron.base.errors import ConfigError
from anytron.device.loading import open_session
from anytron.workers.executor.local import LocalExecutor
from anytron.workers.executor.protocol import GroupSpec
from tests.core.other_environment import make_environment
from tests.core.workers.executor.conftest import small_config


@pytest.fixture
def executor_with(testchip, tmp_path):
    """Make an executor whose rollout processes run with an interpreter."""
    made = []

    def make(python):
        config = small_config(tmp_path / "run", None, {})
        rollout = config.rollout.model_copy(update={"python": str(python)})
        made.append(LocalExecutor(config.model_copy(update={"rollout": rollout}), open_session(platform="testchip")))
        return made[-1]

    yield make
    for executor in made:
        executor.close()


def interpreter_of(facts):
    return Path(f"/proc/{facts['pid']}/cmdline").read_text().partition("\0")[0]


def test_the_rollout_process_runs_there_and_training_ranks_do_not(executor_with, tmp_path):
    python = make_environment(tmp_path / "venv", anytron=__version__)
    executor = executor_with(python)

    rollout = executor.start(GroupSpec("rollout", "anytron.training_engines", "small", 1, 1))
    trainer = executor.start(GroupSpec("trainer", "anytron.training_engines", "small", 1, 1))

    (there,), (here,) = rollout.call("describe"), trainer.call("describe")
    assert interpreter_of(there) == str(python)
    assert interpreter_of(here) != str(python)
    assert there["steps"] == 7
    assert rollout.call("echo", {"a": (1, 2)}) == [(0, ({"a": (1, 2)},), {})]


def test_one_with_another_version_of_anytron_is_refused_as_the_two_meet(executor_with, tmp_path):
    python = make_environment(tmp_path / "venv", anytron="0.0.9")
    rollout = executor_with(python).start(GroupSpec("rollout", "anytron.training_engines", "small", 1, 1))
    with pytest.raises(ConfigError, match=rf"(?s)another version.*{python}.*{__version__}, and there is 0\.0\.9.*pip"):
        rollout.call("describe")
