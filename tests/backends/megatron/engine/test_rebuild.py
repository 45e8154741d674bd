"""Engines follow each other in the same processes, and leave nothing behind there."""

from pathlib import Path

import torch

from anytron.trainer.updates import UpdatePlan

TENSOR = {"tensor_model_parallel_size": 2}
PIPELINE = {"pipeline_model_parallel_size": 2}


def test_later_engines_compute_as_the_first_and_nothing_piles_up(ranks, tiny_model, recorded):
    scores, threads, patches = [], [], []
    for parallel in (TENSOR, PIPELINE) * 3:
        workers, config = ranks.engine(tiny_model, parallel=parallel)
        scores.append(workers.score(recorded, UpdatePlan.from_config(config), "policy"))
        # A process group has threads of its own.
        tasks = [Path(f"/proc/{process.pid}/task") for process in workers.group._processes]
        threads.append(sum(len(list(folder.iterdir())) for folder in tasks))
        patches.append(workers.describe()[0]["patches"])

    for score in scores[1:]:
        torch.testing.assert_close(score, scores[0], atol=1e-5, rtol=0)
    # An engine that left its groups behind would add half as many as there are after the second.
    assert max(threads[4:]) < 1.3 * max(threads[1:3]), threads
    assert all(one == patches[0] for one in patches), "the patches of a process stay, and are not applied twice"
