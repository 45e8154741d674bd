"""A machine that no longer hears the driver ends what it has of the run; one that hears it does not."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from anytron.base.errors import ProcessLost
from anytron.workers.executor.protocol import GroupSpec
from anytron_ray import lease
from anytron_ray.lease import Lease
from tests.core.workers.executor.processes import is_alive, parent, wait_until_gone

LIMIT_S = 5.0


@pytest.mark.slow
def test_an_agent_that_no_longer_hears_the_driver_ends_its_worker_and_itself(make_executor, tmp_path):
    executor = make_executor(2, heartbeat_timeout_s=LIMIT_S)
    executor._resource = "APART"  # one rank is on the driver's machine, the other one is not
    group = executor.start(GroupSpec("trainer", "anytron.training_engines", "small", 2, 1))
    (here,) = (rank for rank, host in enumerate(group.hosts) if host.id == executor.host.id)
    away = 1 - here
    pids, children = [facts["pid"] for facts in group.call("describe")], group.call("child")
    agents = list(map(parent, pids))

    time.sleep(2 * LIMIT_S)  # the main thread is in a function of a user's
    assert all(map(is_alive, [*pids, *children, *agents]))

    os.kill(pids[away], signal.SIGSTOP)  # it may stand in a library, and not see that its agent ends
    group._renewal.stop()  # as if the cable were pulled
    assert wait_until_gone([pids[away], children[away], agents[away]], 3 * LIMIT_S)
    time.sleep(LIMIT_S)
    assert all(map(is_alive, [pids[here], children[here], agents[here]])), "nothing lies between them and the driver"

    log = (tmp_path / f"run/logs/trainer-{away}.log").read_text()
    assert f"The agent of trainer rank {away} no longer hears the driver, and has ended" in log
    assert f"no sign of life came from the driver's machine {executor.host.address} for 7 s" in log
    assert "raise executor.heartbeat_timeout_s" in log
    with pytest.raises(ProcessLost, match=rf"rank {away} failed in echo\(\): its Ray agent is gone"):
        group.call("echo")


@pytest.mark.slow
def test_a_driver_that_was_stopped_learns_which_rank_no_longer_heard_it(ray, testchip, tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(f"""
        from anytron.base.errors import ProcessLost
        from anytron.device.loading import open_session
        from anytron.workers.executor.protocol import GroupSpec
        from anytron_ray.executor import RayExecutor
        from tests.core.workers.executor.conftest import small_config
        from pathlib import Path
        settings = dict(kind="ray", heartbeat_timeout_s={LIMIT_S})
        config = small_config(Path({str(tmp_path / "run")!r}), None, settings, data_parallel_size=2)
        with RayExecutor(config, open_session(platform="testchip")) as executor:
            executor._resource = "APART"
            group = executor.start(GroupSpec("trainer", "anytron.training_engines", "small", 2, 1))
            pids = [facts["pid"] for facts in group.call("describe")]
            print(*[pid for pid, host in zip(pids, group.hosts) if host.id != executor.host.id], flush=True)
            try:
                group.call("work", 600.0)
            except ProcessLost as error:
                print(error, flush=True)
        """)
    )
    variables = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=variables)
    with driver:
        (away,) = map(int, driver.stdout.readline().split())
        driver.send_signal(signal.SIGSTOP)
        assert wait_until_gone([away], 3 * LIMIT_S)
        driver.send_signal(signal.SIGCONT)
        said, _ = driver.communicate()

    assert "failed in work(): its Ray agent is gone" in said
    assert "no longer hears the driver" in said, "the log is on a shared file system"
    assert driver.returncode == 0


def test_renewals_keep_a_lease_and_time_in_which_the_machine_stood_still_does_not_count(monkeypatch):
    over, stood_still = threading.Event(), threading.Event()
    monkeypatch.setattr(lease, "BEAT_S", 0.1)
    held = Lease(1.0, over.set)
    wait = held._renewed.wait

    def frozen(timeout_s):
        if stood_still.is_set():
            stood_still.clear()
            time.sleep(2.0)
        return wait(timeout_s)

    monkeypatch.setattr(held._renewed, "wait", frozen)
    for _ in range(20):
        held.renew()
        assert not over.wait(0.1)
    stood_still.set()
    assert not over.wait(2.5), "0.9 s are left when it goes on"
    held.renew()
    assert not over.wait(0.5)
    assert over.wait(5.0)
