"""One of two ranks that call collectives as Megatron calls them, and compare what they receive.

usage: collective_rank.py RANK STORE REDIRECT COLLECTIVE[,COLLECTIVE...] [PLATFORM]
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from anytron.device.loading import open_session
from anytron_megatron.redirect.collectives import substitutions
from anytron_megatron.redirect.substitution import substitute

torch.set_num_threads(1)
rank, path, redirect, collectives = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True", sys.argv[4].split(",")
runtime = open_session(sys.argv[5] if sys.argv[5:] else "cpu").platform.runtime()
runtime.set_device(rank)
torch.set_default_device(runtime.current_device())
dist.init_process_group(
    runtime.communication_backend, init_method=f"file://{path}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
)
if redirect:
    substitute(substitutions(runtime))


def eight():
    return torch.arange(8.0).reshape(2, 4)


def scatter():
    received, chunks = torch.empty(2, 2), list(eight().chunk(2, dim=1))
    dist.scatter(received, chunks if rank == 0 else None, src=0)
    return torch.equal(received, chunks[rank])


def all_gather():
    chunks = list(eight().view(4, 2).split([3, 1]))
    received = [torch.empty_like(chunk) for chunk in chunks]
    dist.all_gather(received, chunks[rank])
    return all(torch.equal(one, other) for one, other in zip(received, chunks, strict=True))


def gather_into_one():
    right = True
    for shape, result in (((4, 2), (16,)), ((4, 2), (2, 4, 2)), ((8,), (4, 4)), ((), (2,))):
        own = (eight() + 10 * rank).flatten()[: torch.Size(shape).numel()].reshape(shape)
        output = torch.empty(result)
        dist.all_gather_into_tensor(output_tensor=output, input_tensor=own)
        wanted = [(eight() + 10 * other).flatten()[: own.numel()] for other in range(2)]
        right = right and torch.equal(output.flatten(), torch.cat(wanted))
    return right


def reduce_and_scatter_one():
    right = True
    for shape, result in (((16,), (2, 4)), ((2, 2, 4), (2, 4)), ((4, 4), (8,)), ((2,), ())):
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        output = torch.empty(result)
        dist.reduce_scatter_tensor(output, whole + rank)
        right = right and torch.equal(output.flatten(), (2 * whole + 1).flatten().chunk(2)[rank])
    return right


def multiply_and_sum():
    right, whole, half = True, eight(), dist._make_nccl_premul_sum(0.5)
    for name in ("reduce_scatter_tensor", "reduce_scatter_single", "_reduce_scatter_base"):
        if hasattr(dist.distributed_c10d, name):
            given, output = whole + rank, torch.empty(4)
            getattr(dist.distributed_c10d, name)(output, given, op=half)
            right = right and torch.equal(output, (whole + 0.5)[rank]) and torch.equal(given, whole + rank)
    summed = whole + rank
    work = dist.all_reduce(summed, op=half, async_op=True)
    work.wait()
    return right and torch.equal(summed, whole + 0.5)


def average():
    dist.all_reduce(found := eight() * (rank + 1), op=dist.ReduceOp.AVG)
    return torch.equal(found, 1.5 * eight())


def coalesced():
    found, row = [torch.empty(2, 8) for _ in range(2)], eight().flatten()
    with dist._coalescing_manager(async_ops=True) as works:
        dist.all_gather_into_tensor(found[0], row + rank)
        dist.all_gather_into_tensor(found[1], row * rank)
    works.wait()
    return torch.equal(found[0], torch.stack([row, row + 1])) and torch.equal(found[1], torch.stack([0 * row, row]))


def nothing():
    five = eight()[:1].repeat(5, 1)
    received, parts = torch.empty(5 * rank, 4), [0, 5 * rank]
    dist.all_to_all_single(received, five[: 5 * rank], parts, parts)
    empty = torch.empty(0, 4)
    dist.all_reduce(empty)
    dist.broadcast(empty, 0)
    dist.all_gather_into_tensor(torch.empty(0, 4), empty)
    return torch.equal(received, five[: 5 * rank])


def point_to_point():
    received = torch.empty(2, 4)
    for work in [dist.isend(eight() + rank, 1 - rank), dist.irecv(received, 1 - rank)]:
        work.wait()
    return torch.equal(received, eight() + 1 - rank)


def objects():
    found = [None, None]
    dist.all_gather_object(found, {"rank": rank})
    dist.barrier()
    return found == [{"rank": 0}, {"rank": 1}]


for collective in collectives:
    print(collective, "RIGHT" if globals()[collective]() else "WRONG", flush=True)
dist.destroy_process_group()
