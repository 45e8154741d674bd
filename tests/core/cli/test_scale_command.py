"""``anytron scale``: another number of replicas for a run that goes on."""

import signal
import subprocess
import time

import pytest

from tests.core.cli.conftest import COMMAND, EXAMPLE, anytron
from tests.core.workers.executor.processes import offspring, wait_until_gone

STEPS = 400


@pytest.mark.slow
def test_a_run_gets_a_replica_and_loses_it_again(tmp_path):
    run = tmp_path / "run"
    settings = [f"trainer.output_dir={run}", f"trainer.total_steps={STEPS}", "trainer.save_hf=false"]
    with (tmp_path / "output").open("w") as output:
        driver = subprocess.Popen([*COMMAND, "train", EXAMPLE, *settings], stdout=output, stderr=output)
    try:
        told = tmp_path / "output"
        wait_for(lambda: "step 1/" in told.read_text(), driver)
        assert not (run / "logs/rollout-1-0.log").exists()
        before = set(offspring(driver.pid))
        done = anytron("scale", run, "2")
        assert done.stdout == f"the run in {run} changes to 2 replicas before its next step\n"
        wait_for(lambda: "rollout.replicas: 1 -> 2" in told.read_text(), driver)
        joined = set(offspring(driver.pid)) - before
        assert joined
        wait_for((run / "logs/rollout-1-0.log").exists, driver)
        assert anytron("scale", run, "1").returncode == 0
        wait_for(lambda: "rollout.replicas: 2 -> 1" in told.read_text(), driver)
        assert wait_until_gone(joined)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(60) == 0
    finally:
        driver.kill()
        driver.wait()
    refused = anytron("scale", run, "2")
    assert refused.returncode == 1
    assert "the run is stopped before its last step" in refused.stderr


def wait_for(condition, driver):
    """Wait until a condition holds, while the run goes on."""
    end = time.monotonic() + 90
    while not condition():
        assert driver.poll() is None, "the run has ended"
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_is_no_run_is_refused_and_so_is_no_replica(tmp_path):
    done = anytron("scale", tmp_path, "2")
    assert done.returncode == 1
    assert "This is not the directory of a run." in done.stderr
    done = anytron("scale", tmp_path, "0")
    assert done.returncode == 2
    assert "REPLICAS" in done.stderr
