"""Qwen3-VL's deepstack with and without its patch. Run as: ... RANK WORLD STORE DIRECTORY, on two ranks.

DIRECTORY holds a tiny Qwen3-VL. Prints one JSON object: for mcore-bridge as it is and for the patched one

* ``padded``: how far logits of two padded rows with images are from those of the rows alone (TP2);
* ``context``: what two padded rows do with context parallelism, "ran" or an error;
* ``gradient``: the size of the deepstack merger's gradient with sequence parallelism, after Megatron's
  average over tensor-parallel ranks, relative to that without.
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
PATCH = "megatron.mcore-bridge-deepstack"
for phase in (Phase.BEFORE_IMPORT, Phase.BEFORE_PARALLEL_INIT):
    ledger.apply(phase, [patch for patch in trainer_patches(phase, context) if patch.id != PATCH])
torch.distributed.init_process_group(
    "gloo", store=torch.distributed.FileStore(store, world), rank=rank, world_size=world
)

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402

from anytron_megatron.models.bridge import BridgeSource  # noqa: E402

# Two rows of 16 tokens, an image of 4 tokens in each, at different places.
GRID = torch.tensor([[1, 4, 4], [1, 4, 4]])
PIXELS = torch.randn(32, 96, generator=torch.Generator().manual_seed(0))
TOKENS = json.loads((directory / "config.json").read_text())
IMAGE = [TOKENS["vision_start_token_id"], *[TOKENS["image_token_id"]] * 4, TOKENS["vision_end_token_id"]]
ROWS = torch.tensor([[*range(3, 7), *IMAGE, *range(7, 13)], [5, *IMAGE, *range(20, 29)]])
POSITIONS = torch.arange(16).expand(3, 2, 16)


def build(**sizes):
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.get("tensor", 1), context_parallel_size=sizes.get("context", 1)
    )
    model_parallel_cuda_manual_seed(1)
    bridge = BridgeSource(
        directory,
        dtype=torch.float32,
        sizes=ParallelSizes(**sizes),
        recompute="none",
        deterministic=False,
        transformer={},
    )
    (model,) = bridge.build(torch.device("cpu"))
    return model.eval()


def padded():
    model = build(tensor=2)
    with torch.no_grad():
        together = model(ROWS, POSITIONS, pixel_values=PIXELS, image_grid_thw=GRID)
        alone = [
            model(ROWS[i : i + 1], POSITIONS[:, :1], pixel_values=PIXELS[16 * i :][:16], image_grid_thw=GRID[:1])
            for i in range(2)
        ]
    parallel_state.destroy_model_parallel()
    return float((together - torch.cat(alone)).abs().max())


def sharded():
    model = build(context=2)
    try:
        with torch.no_grad():
            model(ROWS, POSITIONS[..., :8], pixel_values=PIXELS, image_grid_thw=GRID)
        return "ran"
    except (RuntimeError, IndexError) as error:
        return str(error)
    finally:
        parallel_state.destroy_model_parallel()


def gradient(sequence_parallel):
    model = build(tensor=2, sequence_parallel=sequence_parallel)
    logits = model(ROWS[:1], POSITIONS[:, :1], pixel_values=PIXELS[:16], image_grid_thw=GRID[:1])
    logits.square().sum().backward()
    weight = model.visual.visual.deepstack_merger_list[0].linear_fc2.weight
    assert weight.average_gradients_across_tp_domain
    grad = weight.grad.clone()
    torch.distributed.all_reduce(grad)  # as megatron/core/distributed/finalize_model_grads.py
    parallel_state.destroy_model_parallel()
    return grad / world


def relative(one, other):
    return float(one.norm() / other.norm())


def facts():
    return {"padded": padded(), "context": sharded(), "gradient": relative(gradient(True), gradient(False))}


found = {"upstream": facts()}
(patch,) = [patch for patch in trainer_patches(Phase.BEFORE_PARALLEL_INIT, context) if patch.id == PATCH]
ledger.apply(Phase.BEFORE_PARALLEL_INIT, [patch])
found["patched"] = facts()
if rank == 0:
    print(json.dumps(found))
