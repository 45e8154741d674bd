"""One rank of a column- and row-parallel MLP; compared with the whole MLP on the same data."""

import os
import sys

import torch
import torch.distributed as dist

from anytron.device.loading import hooks_of
from anytron_megatron.portable_te import pytorch as te
from anytron_megatron.portable_te.binding import bind

torch.set_num_threads(1)
sequence_parallel = sys.argv[1] == "sequence_parallel"
dist.init_process_group("gloo")
rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
hooks = hooks_of()
hooks.invariant = "invariant" in sys.argv
bind(hooks, "cpu")

generator = torch.Generator().manual_seed(0)
x = torch.randn(8, 2, 6, generator=generator, dtype=torch.float64)
cotangent = torch.randn(8, 2, 6, generator=generator, dtype=torch.float64)


def mlp(**parallel):
    first = te.LayerNormLinear(
        6, 12, normalization="RMSNorm", params_dtype=torch.float64, parallel_mode="column", **parallel
    )
    second = te.Linear(12, 6, params_dtype=torch.float64, parallel_mode="row", **parallel)
    return first, second


whole = mlp()
with torch.no_grad():
    for layer in whole:
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
parts = mlp(tp_size=size, tp_group=group, sequence_parallel=sequence_parallel)


def my_part(parameter, like):
    if not like.tensor_model_parallel:
        return parameter
    return parameter.chunk(size, like.partition_dim)[rank]


pairs = [
    (name, theirs, getattr(part, name))
    for layer, part in zip(whole, parts, strict=True)
    for name, theirs in layer.named_parameters()
]
with torch.no_grad():
    for name, theirs, ours in pairs:
        ours.copy_(theirs if name == "layer_norm_weight" else my_part(theirs, ours))

whole_x = x.clone().requires_grad_()
expected = whole[1](torch.tanh(whole[0](whole_x)))
expected.backward(cotangent)


def mine(tensor):
    return tensor.chunk(size)[rank] if sequence_parallel else tensor


part_x = mine(x).clone().requires_grad_()
output = parts[1](torch.tanh(parts[0](part_x)))
output.backward(mine(cotangent))
torch.testing.assert_close(output, mine(expected))
torch.testing.assert_close(part_x.grad, mine(whole_x.grad))
for name, theirs, ours in pairs:
    grad = ours.grad.clone()
    if getattr(ours, "sequence_parallel", False):
        dist.all_reduce(grad)  # as Megatron's finalize_model_grads does for parameters with this attribute
    torch.testing.assert_close(grad, theirs.grad if name == "layer_norm_weight" else my_part(theirs.grad, ours))
dist.barrier()
dist.destroy_process_group()
# Modules of this program still refer to the group; at a regular exit its gloo threads would end in std::terminate.
os._exit(0)
