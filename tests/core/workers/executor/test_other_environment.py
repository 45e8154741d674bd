"""A rollout process may run in an environment of its own (``rollout.python``)."""

import socket
import sys
from functools import partial
from pathlib import Path

import pytest

from anytron import __version__
from anytron.base.errors import ConfigError
from anytron.base.version import installable
from anytron.device.loading import open_session
from anytron.workers.executor import base
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
    with pytest.raises(ConfigError, match="different versions of Anytron") as caught:
        rollout.call("describe")
    assert caught.value.where == f"rollout rank 0 on {socket.gethostname()}, rollout.python = {python}"
    assert caught.value.why == f"the driver has {__version__}, and {python} has 0.0.9"
    assert caught.value.fix == f"run {python} -m pip install {installable(__version__)}"


COMMITS = ("0.1.dev7+g0123abcde", "0.1.dev7+gfedcba987", "0.1.dev7+g0123abcde.d20260102")


@pytest.mark.parametrize("commit", COMMITS)
def test_a_training_rank_of_another_commit_is_refused(executor_with, monkeypatch, commit):
    """As on another machine of a Ray cluster: the environment is no other one by configuration."""
    monkeypatch.setattr(base, "Bootstrap", partial(base.Bootstrap, version=commit))
    trainer = executor_with(sys.executable).start(GroupSpec("trainer", "anytron.training_engines", "small", 1, 1))
    with pytest.raises(ConfigError, match="different versions of Anytron") as caught:
        trainer.call("describe")
    assert caught.value.where == f"trainer rank 0 on {socket.gethostname()}"
    assert caught.value.why == f"the driver has {commit}, and {sys.executable} has {__version__}"


def test_what_pip_takes_to_install_a_version():
    release, commit, changed, unknown = (installable(one) for one in ("0.1.0", COMMITS[0], COMMITS[2], "0.1.dev0"))
    assert release == "anytron==0.1.0"
    assert commit == changed
    assert commit == "CLONE, where CLONE is Anytron's sources at commit 0123abcde"
    assert unknown == "CLONE, where CLONE is Anytron's sources as the driver has them"
