"""Reduce gradients and gather parameters as the distributed optimizer does, alone and on two replicas.

Run as: python one_rank_collectives.py RANK WORLD STORE. Rank 0 prints what its buffers held, and how many threads
started, without and with the patches.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from anytron.device.hooks.types import PatchContext
from anytron.device.loading import hooks_of
from anytron.device.patches import Ledger, Phase
from anytron_cpu import CpuPlatform
from anytron_megatron.patches import trainer_patches

SIZE = 512
"""Of a square weight: large enough for torch to copy it with several threads."""


def wrapped(overlap):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=overlap
    )
    return DistributedDataParallel(config, ddp, torch.nn.Linear(SIZE, SIZE, bias=False))


def threads():
    return len(list(Path("/proc/self/task").iterdir()))


def exchange(overlap):
    """Each replica has gradients of its rank + 1, and parameters of that in its half: what do all have afterwards?"""
    model, own = wrapped(overlap), float(dist.get_rank() + 1)
    before = threads()
    (buffer,) = model.buffers
    buffer.grad_data.fill_(own)
    if overlap:
        model.start_grad_sync()
    model.finish_grad_sync()
    halves = buffer.param_data.chunk(dist.get_world_size(buffer.data_parallel_group))
    mine = dist.get_rank(buffer.data_parallel_group)
    for place, half in enumerate(halves):
        half.fill_(own if place == mine else 0.0)
    model.start_param_sync()
    gradients = buffer.grad_data.chunk(len(halves))[mine]
    return {
        "gradient": sorted(set(gradients.tolist())),
        "parameters": [sorted(set(half.tolist())) for half in halves],
        "threads": threads() - before,
    }


def main():
    rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(2)
    platform = CpuPlatform()
    context = PatchContext(platform, "trainer", hooks_of(platform), "megatron")
    ledger = Ledger(context=context)
    for phase in (Phase.BEFORE_IMPORT, Phase.BEFORE_PARALLEL_INIT):
        ledger.apply(phase, trainer_patches(phase, context))
    from megatron.core import parallel_state

    facts = {}
    for state in ("unpatched", "patched"):
        if state == "patched":
            patches = trainer_patches(Phase.BEFORE_BUILD, context)
            ours = [patch for patch in patches if patch.id.startswith("megatron.one-rank-collectives")]
            ledger.apply(Phase.BEFORE_BUILD, ours)
            facts["outcome"] = [row["outcome"] for row in ledger.report() if row["id"] in {one.id for one in ours}]
        facts[state] = {}
        for name, tensor in (("alone", world), ("replicas", 1)):
            meeting = f"file://{store}-{state}-{name}"
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor)
            facts[state][name] = exchange(overlap=False)
            facts[state][f"{name}, overlapping"] = exchange(overlap=True)
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(facts))


if __name__ == "__main__":
    main()
