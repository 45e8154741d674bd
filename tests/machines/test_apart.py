"""Rollout processes on machines that train nothing, which needs a platform whose devices Ray counts."""

import os

from tests.machines.cluster import Run
from tests.machines.namespaces import NEEDS_MACHINES, SHARED
from tests.third_party_platform import USABLE, install_into

pytestmark = NEEDS_MACHINES


def test_a_rollout_on_a_machine_of_its_own_has_the_numbers_of_one_machine(cluster, machines):
    """The platform is Basalt, whose devices are the processor: Ray gives one to the rank and one to the replica."""
    folder = machines.shared / "basalt"
    folder.mkdir()
    seen = [path.replace(str(folder), str(SHARED / "basalt")) for path in install_into(folder)]
    paths = os.pathsep.join([*seen, *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**USABLE, "ANYTRON_PLATFORM": "basalt", "PYTHONPATH": paths}
    settings = ("trainer.total_steps=2", "rollout.placement=separate")

    run = cluster.run("apart", *settings, **variables)
    run.reach(1)
    where = {role: run.worker(role)[0] for role in ("trainer-0", "rollout-0")}
    run.succeed()
    here = Run(machines, "apart-local", *settings, **variables).succeed()

    assert where["trainer-0"] != where["rollout-0"]
    assert "weights go to the rollout over the network" in run.text
    assert run.metrics() == here.metrics()
