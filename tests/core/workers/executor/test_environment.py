"""Which devices a process sees, and what it is told of threads and memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anytron.base.errors import ConfigError
from anytron.config.schema import default_run
from anytron.device.loading import open_session
from anytron.workers.executor.base import ranks_beside, threads_asked_for, with_devices, worker_environment
from anytron.workers.executor.channel import Bootstrap


@given(st.integers(1, 20), st.integers(1, 20))
def test_replicas_share_the_training_ranks_among_them_evenly(replicas, ranks):
    shares = [ranks_beside(replica, replicas, ranks) for replica in range(replicas)]
    assert {rank for share in shares for rank in share} == set(range(ranks))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    if replicas <= ranks:
        assert sum(sizes) == ranks, "none has two"
    else:
        users = [sum(rank in share for share in shares) for rank in range(ranks)]
        assert max(users) - min(users) <= 1


def test_devices_are_counted_among_those_that_are_visible():
    assert with_devices({"CHIPS": "4,5,7", "HOME": "/"}, "CHIPS", [0, 2]) == {"CHIPS": "4,7", "HOME": "/"}
    assert with_devices({"CHIPS": ""}, "CHIPS", range(2)) == with_devices({}, "CHIPS", [0, 1]) == {"CHIPS": "0,1"}


def test_the_user_s_word_on_threads_and_memory_is_the_last():
    session = open_session(platform="cpu")
    told = Bootstrap("trainer", 0, 0, 1, 1, 0, 2, "cpu", default_run().model_dump(mode="json"), "", "", [])
    own = worker_environment({}, told, session.hooks)
    assert (own["GOMP_SPINCOUNT"], own["OMP_NUM_THREADS"]) == ("30000", "2")
    assert (own["MALLOC_MMAP_THRESHOLD_"], own["MALLOC_TRIM_THRESHOLD_"]) == ("33554432", "67108864")
    users = {"GOMP_SPINCOUNT": "5", "MALLOC_TRIM_THRESHOLD_": "131072"}
    assert worker_environment(users, told, session.hooks).items() >= users.items()


def test_processes_have_as_many_threads_as_openmp_is_told(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_asked_for() is None
    for said in ("3", "3,2"):
        monkeypatch.setenv("OMP_NUM_THREADS", said)
        assert threads_asked_for() == 3
    for wrong in ("0", "many", "-1", ",2"):
        monkeypatch.setenv("OMP_NUM_THREADS", wrong)
        with pytest.raises(ConfigError, match="OMP_NUM_THREADS"):
            threads_asked_for()
