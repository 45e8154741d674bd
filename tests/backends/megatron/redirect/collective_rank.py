"""One of two ranks that call a collective as Megatron calls it, and compare what they receive.

usage: collective_rank.py RANK STORE REDIRECT COLLECTIVE [PLATFORM]
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from anytron.device.loading import open_session
from anytron_megatron.redirect.collectives import substitutions
from anytron_megatron.redirect.substitution import substitute

torch.set_num_threads(1)
rank, path, redirect, collective = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True", sys.argv[4]
runtime = open_session(sys.argv[5] if sys.argv[5:] else "cpu").platform.runtime()
runtime.set_device(rank)
torch.set_default_device(runtime.current_device())
backend = runtime.communication_backend
dist.init_process_group(backend, init_method="file://" + path, rank=rank, world_size=2, timeout=timedelta(seconds=60))
if redirect:
    substitute(substitutions(runtime))
whole = torch.arange(8.0).reshape(2, 4)
if collective == "scatter":
    received, chunks = torch.empty(2, 2), list(whole.chunk(2, dim=1))
    dist.scatter(received, chunks if rank == 0 else None, src=0)
    right = torch.equal(received, chunks[rank])
elif collective == "gather into one":
    received, right = [], True
    for shape, result in (((4, 2), (16,)), ((4, 2), (2, 4, 2)), ((8,), (4, 4)), ((), (2,))):
        own = (whole + 10 * rank).flatten()[: torch.Size(shape).numel()].reshape(shape)
        output = torch.empty(result)
        dist.all_gather_into_tensor(output_tensor=output, input_tensor=own)
        wanted = [(whole + 10 * other).flatten()[: own.numel()] for other in range(2)]
        right = right and torch.equal(output.flatten(), torch.cat(wanted))
elif collective == "reduce and scatter one":
    right = True
    for shape, result in (((16,), (2, 4)), ((2, 2, 4), (2, 4)), ((4, 4), (8,)), ((2,), ())):
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        output = torch.empty(result)
        dist.reduce_scatter_tensor(output, whole + rank)
        right = right and torch.equal(output.flatten(), (2 * whole + 1).flatten().chunk(2)[rank])
elif collective == "multiply and sum":
    right = True
    half = dist._make_nccl_premul_sum(0.5)
    for name in ("reduce_scatter_tensor", "reduce_scatter_single", "_reduce_scatter_base"):
        if hasattr(dist.distributed_c10d, name):
            given, output = whole + rank, torch.empty(4)
            getattr(dist.distributed_c10d, name)(output, given, op=half)
            right = right and torch.equal(output, (whole + 0.5)[rank]) and torch.equal(given, whole + rank)
    summed = whole + rank
    work = dist.all_reduce(summed, op=half, async_op=True)
    work.wait()
    right = right and torch.equal(summed, whole + 0.5)
elif collective == "average":
    dist.all_reduce(whole.mul_(rank + 1), op=dist.ReduceOp.AVG)
    right = torch.equal(whole, 1.5 * torch.arange(8.0).reshape(2, 4))
elif collective == "coalesced":
    gathered, scattered = torch.empty(2, 8), torch.empty(4)
    with dist._coalescing_manager(async_ops=True) as works:
        dist.all_gather_into_tensor(gathered, whole.flatten() + rank)
        dist.all_gather_into_tensor(other := torch.empty(2, 8), whole.flatten() * rank)
    works.wait()
    right = torch.equal(gathered[1], whole.flatten() + 1) and torch.equal(other, torch.stack([0 * whole.flatten(), whole.flatten()]))
elif collective == "nothing":
    received = torch.empty(5 * rank, 4)
    dist.all_to_all_single(received, whole[:1].repeat(5, 1) if rank else whole[:0], [0, 5 * rank], [0, 5 * rank])
    nothing = torch.empty(0, 4)
    dist.all_reduce(nothing)
    dist.broadcast(nothing, 0)
    dist.all_gather_into_tensor(torch.empty(0, 4), nothing)
    right = torch.equal(received, whole[:1].repeat(5 * rank, 1))
elif collective == "point to point":
    received = torch.empty(2, 4)
    works = [dist.isend(whole + rank, 1 - rank), dist.irecv(received, 1 - rank)]
    for work in works:
        work.wait()
    right = torch.equal(received, whole + 1 - rank)
elif collective == "objects":
    found = [None, None]
    dist.all_gather_object(found, {"rank": rank})
    dist.barrier()
    right = found == [{"rank": 0}, {"rank": 1}]
else:
    chunks = list(whole.view(4, 2).split([3, 1]))
    received = [torch.empty_like(chunk) for chunk in chunks]
    dist.all_gather(received, chunks[rank])
    right = all(torch.equal(one, other) for one, other in zip(received, chunks))
print("RIGHT" if right else "WRONG", flush=True)
dist.destroy_process_group()
