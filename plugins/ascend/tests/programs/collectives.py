"""All collectives between two ranks, against naive results; then what they refuse. Prints one line for each."""

import os

from anytron_ascend_simulator import activate

activate()
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.npu.set_device(rank)
dist.init_process_group("hccl")


def mine(of=None, dtype=torch.float32):
    return (torch.arange(6) + 10 * (rank if of is None else of) + 1).to(dtype)


def check(name, found, expected):
    same = torch.equal(found.cpu(), expected)
    print("ok" if same else f"WRONG {found.cpu().tolist()} {expected.tolist()}", name, flush=True)


everybody = [mine(of) for of in range(size)]
for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64):
    tensor = mine(dtype=dtype).npu()
    dist.all_reduce(tensor)
    check(f"all_reduce {dtype}", tensor, sum(part.to(dtype) for part in everybody))
for operation, fold in (
    (dist.ReduceOp.MAX, torch.maximum),
    (dist.ReduceOp.MIN, torch.minimum),
    (dist.ReduceOp.PRODUCT, torch.mul),
):
    tensor = mine().npu()
    dist.all_reduce(tensor, operation)
    check(f"all_reduce {operation}", tensor, fold(*everybody))
tensor = mine().npu()
dist.all_reduce(tensor, dist.ReduceOp.AVG)  # HCCL has no average: torch_npu divides the sum
check("all_reduce AVG", tensor, sum(everybody) / size)
tensor = mine().npu()
dist.reduce(tensor, 1)
check("reduce", tensor, sum(everybody) if rank == 1 else mine())
tensor = mine().npu()
dist.broadcast(tensor, 1)
check("broadcast", tensor, everybody[1])
parts = [torch.empty(6).npu() for _ in range(size)]
dist.all_gather(parts, mine().npu())
check("all_gather", torch.cat(parts), torch.cat(everybody))
whole = torch.empty(6 * size).npu()
dist.all_gather_into_tensor(whole, mine().npu())
check("all_gather_into_tensor", whole, torch.cat(everybody))
part = torch.empty(3).npu()
dist.reduce_scatter_tensor(part, mine().npu())
check("reduce_scatter", part, sum(everybody).chunk(size)[rank])
found = torch.empty(6).npu()
dist.all_to_all_single(found, mine().npu())
check("all_to_all", found, torch.cat([part.chunk(size)[rank] for part in everybody]))
splits = [1, 5] if rank == 0 else [2, 4]
receives = [1, 2] if rank == 0 else [5, 4]
found = torch.empty(sum(receives)).npu()
dist.all_to_all_single(found, mine().npu(), receives, splits)
check("all_to_all_v", found, torch.cat([everybody[0].split([1, 5])[rank], everybody[1].split([2, 4])[rank]]))
if rank == 0:
    dist.send(mine().npu(), 1)
else:
    dist.recv(found := torch.empty(6).npu(), 0)
    check("send", found, everybody[0])
other, found = 1 - rank, torch.empty(6).npu()
exchange = [dist.P2POp(dist.isend, mine().npu(), other), dist.P2POp(dist.irecv, found, other)]
for work in dist.batch_isend_irecv(exchange):
    work.wait()
check("batch_isend_irecv", found, everybody[other])
alone = dist.new_group([0]), dist.new_group([1])
tensor = mine().npu()
dist.all_reduce(tensor, group=alone[rank])
check("group of one", tensor, mine())
dist.barrier()
print("ok barrier", flush=True)
try:
    # The ranks disagree about the number of elements.
    dist.all_reduce(torch.ones(2 + rank).npu())
    torch.npu.synchronize()
    print("WRONG a mismatch went unnoticed", flush=True)
except RuntimeError:
    print("ok mismatch", flush=True)
os._exit(0)  # the group is unusable, and destroying it would wait
