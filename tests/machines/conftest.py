"""One Ray cluster of four machines for all tests that leave it as it was, or repair it."""

import pytest

from tests.machines.cluster import Cluster, Run
from tests.machines.namespaces import Machines

MACHINES = 4
"""One for the driver, and one more than two ranks need."""


@pytest.fixture(scope="session")
def machines(tmp_path_factory):
    with Machines(MACHINES, tmp_path_factory.mktemp("machines")) as machines:
        yield machines


@pytest.fixture(scope="session")
def shared_cluster(machines):
    """Each machine but the first has a processor, and a device of the platform Basalt."""
    return Cluster(machines, resources='{"BASALT": 1}')


@pytest.fixture
def cluster(shared_cluster):
    """The cluster, on which no process of a run is left at the end of a test."""
    yield shared_cluster
    try:
        shared_cluster.clear()
    finally:
        shared_cluster.sweep()


@pytest.fixture
def to_repair(shared_cluster):
    """Numbers of machines that are replaced after the test, to be filled by it."""
    broken = set()
    yield broken
    for machine in broken:
        shared_cluster.renew(machine)


@pytest.fixture(scope="session")
def undisturbed(machines):
    """The metrics of runs of the executor ``local``, by layout: each is run once."""
    known = {}

    def metrics(steps, *settings):
        if (steps, settings) not in known:
            run = Run(machines, f"local-{len(known)}", f"trainer.total_steps={steps}", *settings)
            known[steps, settings] = run.succeed().metrics()
        return known[steps, settings]

    return metrics
