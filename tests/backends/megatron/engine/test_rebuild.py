"""Engines follow each other in the same processes, and leave nothing behind there."""

from pathlib import Path

import torch

from anytron.run.trainer.updates import UpdatePlan

TENSOR = {"tensor_model_parallel_size": 2}
PIPELINE = {"pipeline_model_parallel_size": 2}


def test_later_engines_compute_as_the_first_and_nothing_piles_up(ranks, tiny_family, recorded, policy_loss):
    scores, threads, patches = [], [], []
    for parallel in (TENSOR, PIPELINE) * 3:
        # Token dispatchers of experts keep tensors of their last pass, and these the whole model.
        workers, config = ranks.engine(tiny_family("qwen3_moe"), parallel=parallel)
        updates = UpdatePlan.from_config(config, workers.topology[0])
        scores.append(workers.score(recorded, updates, "policy"))
        workers.update(recorded, updates, policy_loss)
        # A process group has threads of its own.
        tasks = [Path(f"/proc/{process.pid}/task") for process in workers.group._ranks]
        threads.append(sum(len(list(folder.iterdir())) for folder in tasks))
        patches.append(workers.describe()[0]["patches"])

    for score in scores[1:]:
        torch.testing.assert_close(score, scores[0], atol=1e-5, rtol=0)
    assert max(threads[4:]) <= 1.1 * max(threads[2:4]), f"an engine left process groups behind: {threads}"
    assert all(one == patches[0] for one in patches), "the patches of a process stay, and are not applied twice"


def test_variables_that_libraries_set_at_import_do_not_end_processes(ranks, tiny_model, monkeypatch):
    first, _ = ranks.engine(tiny_model)
    pids = [rank.pid for rank in first.group._ranks]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    second, _ = ranks.engine(tiny_model)

    assert [rank.pid for rank in second.group._ranks] == pids
