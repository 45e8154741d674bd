"""Doctor's look at Ray: from a process of its own, at a real cluster, at none, and at one that is gone."""

import platform
from dataclasses import replace

import pytest

from anytron.base.version import __version__
from anytron.device.loading import open_session
from anytron.proof.doctor import devices, live
from anytron.proof.doctor.subject import Subject
from tests.core.proof.doctor.conftest import by_name
from tests.core.workers.executor.conftest import small_config


@pytest.fixture
def examined(testchip, tmp_path):
    """Examine the executors for a run of some ranks on Ray."""

    def examine(ranks, kind="ray"):
        config = small_config(tmp_path / "run", None, {"kind": kind}, data_parallel_size=ranks)
        subject = replace(Subject(None, ()), run=config, session=open_session(platform="testchip"))
        with live.Live(subject) as process:
            return by_name(devices.examine_executors(subject, process))

    return examine


@pytest.mark.slow
def test_a_cluster_is_joined_and_compared_with_the_run(cluster, examined, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    enough = examined(2)
    assert enough["executors.ray.cluster"].status == "passed"
    assert "2 machines" in enough["executors.ray.cluster"].detail
    assert "2 CHIP" in enough["executors.ray.cluster"].detail
    assert "the resource CHIP" in enough["executors.ray.devices"].detail
    assert enough["executors.ray.room"].status == "passed"
    (machine,) = {name for name in enough if name.startswith("executors.ray.") and name[14].isdigit()}
    assert enough[machine].status == "passed"
    for part in (
        f"anytron {__version__}",
        f"Python {platform.python_version()}",
        "the driver's time",
        "of memory free",
    ):
        assert part in enough[machine].detail
    assert not list(tmp_path.iterdir()), "nothing is left, and nothing made"
    few = examined(3)["executors.ray.room"]
    assert few.status == "failed"
    assert "too few CHIP" in few.detail
    assert "ray start" in few.fix


def test_without_a_cluster_nothing_is_started(examined, monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CHIP_VISIBLE_DEVICES", "1")
    found = examined(1)
    assert "a run starts one of this machine alone" in found["executors.ray.cluster"].detail
    assert "RAY_EXPERIMENTAL_NOSET_CHIP_VISIBLE_DEVICES" in found["executors.ray.visibility"].detail
    assert not (tmp_path / "ray").exists()


@pytest.mark.slow
def test_a_cluster_that_is_gone_fails_a_run_that_needs_it_and_hangs_nobody(examined, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(live, "CALL_S", 60.0)
    found = examined(1)
    failed = [entry for name, entry in found.items() if name.startswith("executors.ray") and entry.status == "failed"]
    assert failed
    assert found["executors.local"].status == "passed"
    other = examined(1, kind="local")
    assert {entry.status for entry in other.values()} <= {"passed", "warning"}
