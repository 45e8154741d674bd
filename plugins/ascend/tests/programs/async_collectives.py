"""Collectives of two ranks with and without a wait: what each reads, as JSON."""

import json
import os

from anytron_ascend_simulator import activate

activate()
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

rank = int(os.environ["RANK"])
torch.npu.set_device(rank)
dist.init_process_group("hccl")
side, current = torch.npu.Stream(), torch.npu.current_stream()


# The name is deprecated in new versions of torch, and the only one in old ones.
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def numbers():
    made = torch.full((3,), 1.0 + rank, device="npu")
    torch.npu.synchronize()
    return made


def the_sum_is_read(wait):
    summed = numbers()
    work = dist.all_reduce(summed, async_op=True)
    if wait:
        work.wait()
    return summed * 1


def gathered_parts_are_read(wait):
    whole = torch.zeros(6, device="npu")
    work = gather(whole, numbers(), async_op=True)
    if wait:
        work.wait()
    return whole[[0, 3]]


def exchanged_parts_are_read(wait):
    received = torch.zeros(2, device="npu")
    work = dist.all_to_all_single(received, numbers()[:2].clone(), async_op=True)
    if wait:
        work.wait()
    return received * 1


def a_message_is_read(wait):
    message = numbers()
    work = dist.isend(message, 1) if rank == 0 else dist.irecv(message, 0)
    if wait:
        work.wait()
    return message * 1


def the_input_is_written_by_another_stream(wait):
    summed = numbers()
    with torch.npu.stream(side):
        summed.mul_(10)
    if wait:
        current.wait_stream(side)
    dist.all_reduce(summed)
    return summed * 1


def the_input_is_overwritten(wait):
    given, whole = numbers(), torch.zeros(6, device="npu")
    work = gather(whole, given, async_op=True)
    if wait:
        work.wait()
    float(given.fill_(7).sum())
    work.wait()
    return whole[[0, 3]].nan_to_num(-1)


CASES = (
    the_sum_is_read,
    gathered_parts_are_read,
    exchanged_parts_are_read,
    a_message_is_read,
    the_input_is_written_by_another_stream,
    the_input_is_overwritten,
)
for case in CASES:
    found = []
    for wait in (False, True):
        found.append(case(wait).tolist())
        torch.npu.synchronize()
    print(json.dumps({"case": case.__name__, "without": found[0], "with": found[1]}), flush=True)
dist.destroy_process_group()
