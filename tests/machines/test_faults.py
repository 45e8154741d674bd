"""Faults of a machine or a process while a run trains: it goes on, with the numbers of a run to which nothing happened.

Processes and machines that are lost are named within 90 s, and no process of the run is left on any machine.
"""

import os
import time

import pytest

from tests.machines.cluster import HEAD, START_S
from tests.machines.namespaces import NEEDS_MACHINES, OWN, SHARED, address, name

pytestmark = NEEDS_MACHINES

TP2 = "parallel.tensor_model_parallel_size=2"
STEPS = 8
NOTICED_S = 90.0
HEARTBEAT_S = 10


@pytest.fixture
def start(cluster):
    """Start a run of two ranks, which loses at most two steps when all processes start again."""

    def start(run, *settings):
        often = ("checkpoint.every_steps=2", f"executor.heartbeat_timeout_s={HEARTBEAT_S}")
        return cluster.run(run, f"trainer.total_steps={STEPS}", TP2, *often, *settings)

    return start


@pytest.fixture
def goes_on(cluster, undisturbed):
    """Check that a run names a lost process and its machine, goes on, and ends as if nothing had happened."""

    def check(run, machine):
        run.say("start again", NOTICED_S)
        (line,) = [line for line in run.text.splitlines() if "start again" in line]
        assert "rainer rank 1" in line, line
        assert address(machine) in line, line
        run.succeed()
        assert run.metrics() == undisturbed(STEPS, TP2)
        cluster.clear()

    return check


def test_a_killed_rank(start, goes_on):
    run = start("killed-rank")
    run.say("checkpoint of step 2", START_S)
    machine, process = run.worker("trainer-1")
    process.kill()
    goes_on(run, machine)


def test_a_killed_agent(start, goes_on, cluster):
    run = start("killed-agent")
    run.say("checkpoint of step 2", START_S)
    machine, _ = run.worker("trainer-1")
    for agent in cluster.machines.processes(machine, "ray::Agent"):
        agent.kill()
    goes_on(run, machine)


def test_a_killed_raylet(start, goes_on, cluster, to_repair):
    run = start("killed-raylet")
    run.say("checkpoint of step 2", START_S)
    machine, _ = run.worker("trainer-1")
    to_repair.add(machine)
    (raylet,) = cluster.machines.processes(machine, "raylet/raylet")
    raylet.kill()
    goes_on(run, machine)


def test_a_machine_that_is_shut_off(start, goes_on, cluster, to_repair):
    run = start("shut-off")
    run.say("checkpoint of step 2", START_S)
    machine, _ = run.worker("trainer-1")
    to_repair.add(machine)
    cluster.machines.off(machine)
    goes_on(run, machine)


def test_a_machine_that_is_cut_off_and_comes_back(start, goes_on, cluster, to_repair):
    """The cut-off machine ends the run's processes by itself, before it comes back."""
    machines = cluster.machines
    run = start("cut-off")
    run.say("checkpoint of step 2", START_S)
    machine, _ = run.worker("trainer-1")
    to_repair.add(machine)
    machines.unplug(machine)
    cut = time.monotonic()
    try:
        run.say("start again", NOTICED_S)
        # The driver's last sign of life may have come late, and the agent looks once a second.
        while time.monotonic() < cut + HEARTBEAT_S + 10:
            time.sleep(0.2)
        left = cluster.left().get(machine, [])
    finally:
        machines.plug(machine)
    goes_on(run, machine)
    assert left == [], "on the machine that did not hear the driver for executor.heartbeat_timeout_s"


def test_a_killed_driver(start, cluster):
    run = start("killed-driver")
    run.say("checkpoint of step 2", START_S)
    for process in cluster.machines.processes(HEAD, "anytron train"):
        process.kill()
    cluster.clear()


def test_a_full_disk_of_one_machine(start, cluster):
    """What it writes into the shared directory fails there, as over a quota; what the others write does not."""
    machines = cluster.machines
    run = start("full-disk", "trainer.max_restarts=0")
    run.reach(1)
    machine, _ = run.worker("trainer-1")
    directory = SHARED / "full-disk" / "checkpoints"
    machines.on(
        machine,
        *("sh", "-ec"),
        f"mkdir -p {OWN}/small {directory}; mount -t tmpfs -o size=16k tmpfs {OWN}/small; "
        f"mkdir {OWN}/small/new {OWN}/small/work; mount -t overlay overlay "
        f"-o lowerdir={directory},upperdir={OWN}/small/new,workdir={OWN}/small/work {directory}",
    )
    try:
        text = run.fail(NOTICED_S)
    finally:
        machines.on(machine, "umount", str(directory), f"{OWN}/small")
    assert "The checkpoint could not be written" in text
    assert f"rank 1 on {name(machine)}: " in text
    assert "No space left on device" in text
    cluster.clear()


CLOCK = """
import time
time_s, time_ns = time.time, time.time_ns
time.time = lambda: time_s() + {hours} * 3600
time.time_ns = lambda: time_ns() + {hours} * 3600 * 10**9
"""
"""What Python runs as it starts. (libfaketime makes Python's waits fail or last for ever.)"""


@pytest.mark.parametrize("hours", [3, -3])
def test_a_clock_that_is_hours_off(cluster, undisturbed, to_repair, hours):
    """Of the machines that can have a rank, all but one, as Python sees the time: then at least one rank has it."""
    for machine in (3, 4):
        to_repair.add(machine)
        folder = cluster.machines.shared / f"clock{hours}"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(CLOCK.format(hours=hours))
        cluster.renew(
            machine,
            PYTHONPATH=os.pathsep.join([str(SHARED / folder.name), *filter(None, [os.environ.get("PYTHONPATH")])]),
        )
    run = cluster.run(f"clock-run{hours}", "trainer.total_steps=2", TP2).succeed()
    warnings = [line for line in run.text.splitlines() if "has a clock that is" in line]
    assert warnings
    assert all(f"{'ahead of' if hours > 0 else 'behind'} the driver's" in line for line in warnings)
    assert run.metrics() == undisturbed(2, TP2)


def test_a_slow_network_that_loses_frames(cluster, undisturbed):
    """50 ms from machine to machine, and 1 % of the frames lost on the way."""
    machines = cluster.machines
    for machine in machines.numbers:
        machines.slow(machine, 0.025, 0.005)
    try:
        run = cluster.run("slow-network", "trainer.total_steps=2", TP2).succeed()
    finally:
        for machine in machines.numbers:
            machines.fast(machine)
    assert run.metrics() == undisturbed(2, TP2)
