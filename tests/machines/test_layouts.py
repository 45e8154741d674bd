"""A run over several machines has the numbers of a run on one, digit for digit."""

import pytest

from tests.machines.namespaces import NEEDS_MACHINES

pytestmark = NEEDS_MACHINES

DP2 = "parallel.data_parallel_size=2"


@pytest.mark.parametrize(
    "layout",
    [DP2, "parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2"],
)
def test_a_layout_over_two_machines_has_the_numbers_of_one(cluster, undisturbed, layout):
    run = cluster.run(f"layout-{layout[9:13]}", "trainer.total_steps=3", layout)
    run.reach(1)
    machines = {run.worker(f"trainer-{rank}")[0] for rank in (0, 1)}
    run.succeed()

    assert len(machines) == 2
    assert [line["step"] for line in run.metrics()] == [1, 2, 3]
    assert run.metrics() == undisturbed(3, layout)


def test_replicas_on_two_machines_have_the_numbers_of_one(cluster, undisturbed):
    run = cluster.run("replicas", "trainer.total_steps=3", "rollout.replicas=2", DP2)
    run.reach(1)
    machines = {run.worker(log)[0] for log in ("rollout-0", "rollout-1-0")}
    run.succeed()

    assert len(machines) == 2
    assert run.metrics() == undisturbed(3, DP2), "where a response is generated does not matter"
