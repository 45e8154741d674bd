"""Send as an interleaved pipeline does: free the tensor at once, and let the receiver be late.

Run as: python pipeline_sends.py RANK WORLD STORE. Rank 0 prints what arrived, without and with the patch.
"""

import json
import sys

import torch
import torch.distributed as dist

from anytron.device.hooks.types import PatchContext
from anytron.device.loading import hooks_of
from anytron.device.patches import Ledger, Phase
from anytron_cpu import CpuPlatform
from anytron_megatron.patches import trainer_patches

SENT = 7.0


def transfer(group):
    """From rank 1 to rank 0, both ways that a stage sends; rank 0 returns whether it got what was sent."""
    from megatron.core.pipeline_parallel import p2p_communication
    from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor

    outcome = {}
    for direction, opposite in (("next", "prev"), ("prev", "next")):
        tensors = dict.fromkeys(("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next"))
        post = {"group": group, "prev_pipeline_rank": 1 - dist.get_rank(), "next_pipeline_rank": 1 - dist.get_rank()}
        if dist.get_rank() == 1:
            output = tensors[f"tensor_send_{direction}"] = torch.full((4096,), SENT)
            requests = p2p_communication._p2p_ops(**tensors, **post)
            del tensors
            deallocate_output_tensor(output, deallocate_pipeline_outputs=True)
            others = [torch.zeros(4096) for _ in range(4)]  # the memory is used for something else
            dist.barrier()
            requests[f"send_{direction}"].wait()
            del others
        else:
            dist.barrier()
            received = tensors[f"tensor_recv_{opposite}"] = torch.zeros(4096)
            p2p_communication._p2p_ops(**tensors, **post)[f"recv_{opposite}"].wait()
            outcome[direction] = bool((received == SENT).all())
    return outcome


def main():
    rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    platform = CpuPlatform()
    context = PatchContext(platform, "trainer", hooks_of(platform), "megatron")
    ledger = Ledger(context=context)
    for phase in (Phase.BEFORE_IMPORT, Phase.BEFORE_PARALLEL_INIT):
        ledger.apply(phase, trainer_patches(phase, context))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world)
    group = parallel_state.get_pipeline_model_parallel_group()
    facts = {"unpatched": transfer(group)}
    (patch,) = [
        patch for patch in trainer_patches(Phase.BEFORE_BUILD, context) if patch.id == "megatron.pipeline-sends"
    ]
    ledger.apply(Phase.BEFORE_BUILD, [patch])
    facts["patched"] = transfer(group)
    facts["outcome"] = [row["outcome"] for row in ledger.report() if row["id"] == patch.id]
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(facts))


if __name__ == "__main__":
    main()
