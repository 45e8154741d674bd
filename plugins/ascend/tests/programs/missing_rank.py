"""Rank 1 leaves; rank 0 waits for it in a collective."""

import os

from anytron_ascend_simulator import activate

activate()
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

rank = int(os.environ["RANK"])
torch.npu.set_device(rank)
dist.init_process_group("hccl")
tensor = torch.ones(2).npu()
dist.all_reduce(tensor)
if rank == 1:
    os._exit(0)
try:
    dist.all_reduce(tensor)
    torch.npu.synchronize()
    print("WRONG", flush=True)
except RuntimeError:
    print("ok", flush=True)
os._exit(0)
