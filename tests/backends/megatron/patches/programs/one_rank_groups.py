"""Split two ranks several ways, and count process groups and threads.

Run as: python one_rank_groups.py RANK WORLD STORE. Rank 0 prints what each split cost and what its collectives
gave, without and with the patch.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from anytron.device.hooks.types import PatchContext
from anytron.device.loading import hooks_of
from anytron.device.patches import Ledger, Phase
from anytron_cpu import CpuPlatform
from anytron_megatron.patches import trainer_patches

SPLITS = {"tensor": (2, 1), "pipeline": (1, 2), "data": (1, 1)}


def threads():
    return len(list(Path("/proc/self/task").iterdir()))


def costs():
    """Threads of this process, and its process groups of one rank and of more."""
    sizes = [dist.get_world_size(group) for group in dist.distributed_c10d._world.pg_map]
    return {"threads": threads(), "alone": sizes.count(1), "together": len(sizes) - sizes.count(1)}


def difference(before):
    return {name: value - before[name] for name, value in costs().items()}


def total(group):
    """The sum of ranks plus 1 over a group."""
    value = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(value, group=group)
    return value.item()


def split(name, rank, world, store):
    """Join, split, reduce over every axis, split again in the same world, and leave."""
    from megatron.core import parallel_state

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    tensor, pipeline = SPLITS[name]
    sums, costs_of = [], []
    for _ in range(2):  # a second split in the same world finds no group that was destroyed
        before = costs()
        # Gloo groups beside the others have a backend of their own, and are not shared.
        parallel_state.initialize_model_parallel(tensor, pipeline, create_gloo_process_groups=False)
        costs_of.append(difference(before))
        groups = {
            "tensor": parallel_state.get_tensor_model_parallel_group(),
            "pipeline": parallel_state.get_pipeline_model_parallel_group(),
            "data": parallel_state.get_data_parallel_group(),
            "context": parallel_state.get_context_parallel_group(),
        }
        sums.append({axis: total(group) for axis, group in groups.items()})
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return {"costs": costs_of, "sums": sums}


def apart():
    """Whether groups of one rank with another timeout, or a backend of their own, stay groups of their own."""
    from megatron.core import parallel_state

    plain = parallel_state.create_group([0])
    return {
        "same": parallel_state.create_group([0]) is plain,
        "another timeout": parallel_state.create_group([0], timeout=timedelta(seconds=5)) is not plain,
        "another backend": parallel_state.create_group([0], backend="gloo") is not plain,
        "local": parallel_state.create_group([0], use_local_synchronization=True) is not plain,
    }


def main():
    rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    platform = CpuPlatform()
    context = PatchContext(platform, "trainer", hooks_of(platform), "megatron")
    ledger = Ledger(context=context)
    ledger.apply(Phase.BEFORE_IMPORT, trainer_patches(Phase.BEFORE_IMPORT, context))
    facts = {}
    for state in ("unpatched", "patched"):
        if state == "patched":
            patches = trainer_patches(Phase.BEFORE_PARALLEL_INIT, context)
            ledger.apply(Phase.BEFORE_PARALLEL_INIT, [one for one in patches if one.id == "megatron.one-rank-groups"])
        facts[state] = {name: split(name, rank, world, f"{store}-{state}-{name}") for name in SPLITS}
    if rank == 0:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        facts["apart"] = apart()
        dist.destroy_process_group()
        facts["outcome"] = [row["outcome"] for row in ledger.report() if row["id"] == "megatron.one-rank-groups"]
        print(json.dumps(facts))


if __name__ == "__main__":
    main()
