"""A Ray cluster on this machine: chips and NPUs that are not there, and ``APART``, one on each of two nodes."""

import os

import pytest

from anytron.device.loading import open_session
from anytron.workers.executor.protocol import GroupSpec
from tests.core.conftest import testchip  # noqa: F401 - a fixture
from tests.core.workers.executor.conftest import small_config
from tests.core.workers.executor.processes import listeners


@pytest.fixture(scope="session")
def cluster():
    """The cluster."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a token would be left in the home directory
    from ray.cluster_utils import Cluster

    memory = 100 << 20
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 4,
            "num_gpus": 0,
            "resources": {"CHIP": 2, "NPU": 2, "APART": 1},
            "object_store_memory": memory,
            "include_dashboard": False,
        },
    )
    cluster.add_node(num_cpus=1, num_gpus=0, resources={"APART": 1}, object_store_memory=memory)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="session")
def earlier(cluster):
    """Where this process listened before it was a driver: other tests' process groups."""
    return listeners(os.getpid())


@pytest.fixture(scope="session")
def ray(cluster, earlier):
    """Ray, connected to the cluster."""
    import ray

    ray.init(address=cluster.address, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture
def make_executor(ray, testchip, tmp_path):  # noqa: F811
    """Make executors; keyword arguments are keys of the ``executor`` section."""
    from anytron_ray.executor import RayExecutor

    made = []

    def make(ranks=1, engine_options=None, **settings):
        config = small_config(tmp_path / "run", engine_options, {"kind": "ray", **settings}, data_parallel_size=ranks)
        executor = RayExecutor(config, open_session(platform="testchip"))
        made.append(executor)
        return executor

    yield make
    for executor in made:
        executor.close()


@pytest.fixture
def start(make_executor):
    """Start a group of small engines."""

    def start(ranks=2, engine="small", **settings):
        return make_executor(ranks, **settings).start(
            GroupSpec("trainer", "anytron.training_engines", engine, ranks, 1)
        )

    return start
