"""Logits of a tiny Gemma 4 with and without the patch of places. Run as: ... RANK WORLD STORE DIRECTORY, on two ranks.

DIRECTORY holds a tiny Gemma 4, and ``rows.json``, the tokens of rows of one length, which the ranks divide by tensor
and sequence parallelism. Prints one JSON object: the logits ``[B, S, V]`` of mcore-bridge as it is (``upstream``) and
of the patched one (``patched``).
"""

import json
import sys
from pathlib import Path

import torch

from anytron.base.traits import ParallelSizes
from anytron.device.hooks.types import PatchContext
from anytron.device.loading import hooks_of
from anytron.device.patches import Ledger, Phase
from anytron_cpu import CpuPlatform
from anytron_megatron.patches import trainer_patches

rank, world, store, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
torch.set_num_threads(1)
platform = CpuPlatform()
context = PatchContext(platform, "trainer", hooks_of(platform), "megatron")
ledger = Ledger(context=context)
PATCH = "megatron.mcore-bridge-places"
for phase in (Phase.BEFORE_IMPORT, Phase.BEFORE_PARALLEL_INIT):
    ledger.apply(phase, [patch for patch in trainer_patches(phase, context) if patch.id != PATCH])
torch.distributed.init_process_group(
    "gloo", store=torch.distributed.FileStore(store, world), rank=rank, world_size=world
)

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402

from anytron_megatron.models.bridge import BridgeSource  # noqa: E402

ROWS = torch.tensor(json.loads((directory / "rows.json").read_text()))
POSITIONS = torch.arange(ROWS.shape[1]).expand_as(ROWS)


def logits():
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    model_parallel_cuda_manual_seed(1)
    bridge = BridgeSource(
        directory,
        dtype=torch.float32,
        sizes=ParallelSizes(tensor=world, sequence_parallel=True),
        recompute="none",
        deterministic=False,
        transformer={},
    )
    (model,) = bridge.build(torch.device("cpu"))
    with torch.no_grad():
        computed = model.eval()(ROWS, POSITIONS, runtime_gather_output=True)
    parallel_state.destroy_model_parallel()
    return computed.tolist()


found = {"upstream": logits()}
(patch,) = [patch for patch in trainer_patches(Phase.BEFORE_PARALLEL_INIT, context) if patch.id == PATCH]
ledger.apply(Phase.BEFORE_PARALLEL_INIT, [patch])
found["patched"] = logits()
if rank == 0:
    print(json.dumps(found))
