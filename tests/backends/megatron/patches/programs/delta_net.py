"""Gated DeltaNet layers on two tensor-parallel ranks against Hugging Face's layer; print the differences.

Run as: python delta_net.py RANK WORLD_SIZE STORE DIRECTORY, the directory holding a tiny Qwen3-Next. On four ranks each
sequence is split over two context-parallel ones, besides.
Compared are, forward and backward, rows with padding on the right and on the left, holding anything or NaN.
Hugging Face computes each sequence alone. Rank 0 prints JSON: for each case the largest difference of the
output and of three gradients (input, input norm, output norm); what padding's output and gradient hold.
"""

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from anytron.base.errors import EngineError
from anytron.base.traits import ParallelSizes
from anytron.device.hooks.types import PatchContext
from anytron.device.loading import hooks_of
from anytron.device.patches import Ledger, Phase
from anytron.sequences.masks import AttnMask, MaskKind
from anytron_cpu import CpuPlatform
from anytron_megatron.patches import trainer_patches

torch.set_num_threads(1)
rank, world, store, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
platform = CpuPlatform()
context = PatchContext(platform, "trainer", hooks_of(platform), "megatron")
ledger = Ledger(context=context)
for phase in (Phase.BEFORE_IMPORT, Phase.BEFORE_PARALLEL_INIT):
    ledger.apply(phase, trainer_patches(phase, context))
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)

from mcore_bridge.model.modules import GatedDeltaNet  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from anytron.sequences.masks import scope_of  # noqa: E402
from anytron_megatron.models.bridge import BridgeSource  # noqa: E402

TENSOR = 2
CONTEXT = world // TENSOR
parallel_state.initialize_model_parallel(
    TENSOR, context_parallel_size=CONTEXT, expert_model_parallel_size=world, expert_tensor_parallel_size=1
)
model_parallel_cuda_manual_seed(1)
ledger.apply(Phase.BEFORE_BUILD, trainer_patches(Phase.BEFORE_BUILD, context))

theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).model.layers[0]
LENGTHS, WIDTH, HIDDEN = (5, 8, 1), 8, 64
generator = torch.Generator().manual_seed(3)
hidden, cotangent = (torch.randn(len(LENGTHS), WIDTH, HIDDEN, generator=generator) for _ in range(2))
position = torch.arange(WIDTH)
lengths = torch.tensor(LENGTHS)[:, None]
RIGHT, LEFT = position < lengths, position >= WIDTH - lengths


def build(sequence_parallel):
    sizes = ParallelSizes(tensor=TENSOR, context=CONTEXT, expert=world, sequence_parallel=sequence_parallel)
    bridge = BridgeSource(
        directory,
        dtype=torch.float32,
        sizes=sizes,
        recompute="none",
        deterministic=False,
        transformer={},
    )
    (model,) = bridge.build(torch.device("cpu"))
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)


def wanted(real):
    """Hugging Face's layer on each sequence alone: output and the three gradients."""
    theirs.zero_grad()
    given = hidden.clone().requires_grad_()
    output = torch.zeros_like(hidden)
    for row, keep in enumerate(real):
        output[row, keep] = theirs.linear_attn(theirs.input_layernorm(given[row, keep][None]))[0]
    output.backward(cotangent.masked_fill(~real[..., None], 0))
    return output.detach(), given.grad, theirs.input_layernorm.weight.grad, theirs.linear_attn.norm.weight.grad


def shard(tensor, rank):
    """``[S, ...]`` -> the chunks of each stretch of WIDTH that a context-parallel rank holds."""
    if CONTEXT == 1:
        return tensor
    chunks = tensor.unflatten(0, (-1, 2 * CONTEXT, WIDTH // (2 * CONTEXT)))
    return torch.stack([chunks[:, rank], chunks[:, 2 * CONTEXT - 1 - rank]], 1).flatten(0, 2)


def own_part(tensor, model):
    """``[B, S, H]`` -> what this rank's layer takes of it."""
    tensor = shard(tensor.transpose(0, 1), parallel_state.get_context_parallel_rank())
    parts = tensor.chunk(TENSOR if model.config.sequence_parallel else 1)
    return parts[parallel_state.get_tensor_model_parallel_rank() % len(parts)].contiguous()


def whole(tensor, model):
    if model.config.sequence_parallel:
        tensor = gather_from_sequence_parallel_region(tensor.contiguous())
    tensor = tensor.detach().contiguous()
    shards = [torch.empty_like(tensor) for _ in range(CONTEXT)]
    dist.all_gather(shards, tensor, group=parallel_state.get_context_parallel_group())
    places = torch.cat([shard(torch.arange(CONTEXT * len(tensor)), rank) for rank in range(CONTEXT)])
    return torch.cat(shards)[places.argsort()].transpose(0, 1)


def computed(model, real, fill, inputs=(hidden, cotangent), packed=None):
    """Megatron's layer on all rows together, padding and its gradient holding ``fill``."""
    hidden, cotangent = inputs
    layer = model.module.decoder.layers[0].self_attention
    model.zero_grad_buffer()
    pads = ~real[..., None]
    given = own_part(hidden.masked_fill(pads, fill), model).requires_grad_()
    mask = AttnMask(MaskKind.NONE, "causal", linear_attn_mask=real)
    with scope_of(mask)():
        output, _ = layer(given, None, packed_seq_params=packed)
    output.backward(own_part(cotangent.masked_fill(pads, fill), model))
    finalize_model_grads([model], None)
    norms = layer.in_proj.layer_norm_weight.main_grad, layer.out_norm.weight.main_grad
    # Megatron divides gradients by the ranks that see different tokens; its schedule multiplies losses by them first.
    return whole(output, model), whole(given.grad, model), *(grad * CONTEXT for grad in norms)


def differences(model, real, fill):
    expected, got = wanted(real), computed(model, real, fill)
    apart = {
        name: float((one - other)[real].abs().max() if one.ndim == 3 else (one - other).abs().max())
        for name, one, other in zip(("output", "input", "input norm", "output norm"), got, expected, strict=True)
    }
    padding = [float(part[~real].abs().max()) for part in got[:2]]
    return {**apart, "padding's output": padding[0], "padding's gradient": padding[1]}


def packed_differences(model):
    """The same sequences in one buffer, each on its own stretch of WIDTH."""
    starts = torch.arange(0, 3 * WIDTH + 1, WIDTH, dtype=torch.int32)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    buffers = [rows.reshape(1, -1, HIDDEN) for rows in (hidden, cotangent)]
    got = computed(model, RIGHT.reshape(1, -1), 0.0, buffers, PackedSeqParams("thd", ends, ends, starts, starts))
    apart = [
        (one.reshape(3, WIDTH, HIDDEN) - other)[RIGHT] if one.ndim == 3 else one - other
        for one, other in zip(got, wanted(RIGHT), strict=True)
    ]
    return max(float(difference.abs().max()) for difference in apart)


@contextmanager
def without_patch(name):
    """The class as mcore-bridge wrote it, in one method."""
    patched = vars(GatedDeltaNet)[name]
    setattr(GatedDeltaNet, name, patched.__wrapped__)
    try:
        yield
    finally:
        setattr(GatedDeltaNet, name, patched)


def message(function):
    try:
        function()
    except EngineError as error:
        return str(error)
    return None


CASES = {
    "right": (RIGHT, 0.0),
    "right, anything": (RIGHT, 7.0),
    "right, nan": (RIGHT, torch.nan),
    "left": (LEFT, 0.0),
    "left, anything": (LEFT, 7.0),
    "left, nan": (LEFT, torch.nan),
}
facts = {"patched": {}, "without the mask": {}, "without the gradients": {}}
for name in ("sp", "no sp"):
    model = build(name == "sp")
    facts["patched"] |= {f"{name}, {case}": differences(model, *CASES[case]) for case in CASES}
    facts["patched"][f"{name}, packed"] = {"all": packed_differences(model)}
    with without_patch("forward"):
        cases = ("left, anything", "right, nan")
        facts["without the mask"] |= {f"{name}, {case}": differences(model, *CASES[case]) for case in cases}
    with without_patch("__init__"):
        facts["without the gradients"][name] = differences(build(name == "sp"), *CASES["right"])

layer = model.module.decoder.layers[0].self_attention
rows = hidden.transpose(0, 1)
facts["no scope"] = message(lambda: layer(rows, None))
for name, mask in {
    "no map": AttnMask(MaskKind.NONE, "causal"),
    "another shape": AttnMask(MaskKind.NONE, "causal", linear_attn_mask=RIGHT[:, :-1]),
}.items():
    with scope_of(mask)():
        facts[name] = message(lambda: layer(rows, None))
facts["report"] = [row for row in ledger.report() if "gated-delta-net" in row["id"]]
if rank == 0:
    print(json.dumps(facts))
dist.destroy_process_group()
