"""The acceptance test: a run over machines whose processes are killed at random ends as if nothing had happened."""

import random
import time

from tests.machines.namespaces import NEEDS_MACHINES

pytestmark = NEEDS_MACHINES

KILLS = 5
STEPS = 12
NOTICED_S = 90.0
MOST_STEPS = 2
"""Steps between two kills, at most."""
TP2 = "parallel.tensor_model_parallel_size=2"


def test_five_kills_of_workers_at_random_moments_leave_no_trace_in_the_numbers(cluster, undisturbed):
    choices = random.Random(0)
    run = cluster.run(
        "random-kills", f"trainer.total_steps={STEPS}", TP2, "checkpoint.every_steps=1", "trainer.max_restarts=100"
    )
    killed = []
    for _ in range(KILLS):
        run.reach(len(run.metrics()) + choices.randint(1, MOST_STEPS))
        time.sleep(choices.uniform(0.0, 1.0))
        assert run.process.poll() is None, run.text
        role = choices.choice(("trainer-0", "trainer-1", "rollout-0"))
        machine, process = run.worker(role)
        before = run.losses()
        process.kill()
        run.lose(before, NOTICED_S)
        killed.append((role, machine, len(run.metrics())))
    run.succeed()

    assert run.losses() >= KILLS, killed
    assert run.metrics() == undisturbed(STEPS, TP2), killed
