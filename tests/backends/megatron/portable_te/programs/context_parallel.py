"""One rank of attention over sequences split in zigzag; compared with the definition on whole sequences."""

import itertools
import os

import torch
import torch.distributed as dist

from anytron.device.loading import hooks_of
from anytron.kernels.oracles.attention import reference_attention
from anytron_megatron.portable_te import pytorch as te
from anytron_megatron.portable_te.binding import bind

HEADS, KV_HEADS, DIM, V_DIM = 4, 2, 8, 5

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
bind(hooks_of(), "cpu")


def zigzag(start, width):
    """Rows of this rank, of a sequence that starts at a row of the whole buffer."""
    chunks = torch.arange(start, start + width).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def operands(rows):
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, HEADS, DIM), (rows, KV_HEADS, DIM), (rows, KV_HEADS, V_DIM), (rows, HEADS * V_DIM)]
    *inputs, cotangent = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [tensor.requires_grad_() for tensor in inputs], cotangent


def check(lengths, widths, causal, window, softmax_type, attend):
    starts = list(itertools.accumulate(widths, initial=0))
    inputs, cotangent = operands(starts[-1])
    module = te.DotProductAttention(
        HEADS,
        (DIM, V_DIM),
        num_gqa_groups=KV_HEADS,
        attn_mask_type="causal" if causal else "no_mask",
        window_size=window,
        softmax_type=softmax_type,
    ).double()
    module.set_context_parallel_group(group, list(range(size)), None)
    sinks = module.softmax_offset
    if softmax_type == "learnable":
        torch.nn.init.constant_(sinks, 0.7)
    wanted = reference_attention(
        *inputs,
        lengths=lengths,
        starts=starts[:-1],
        key_starts=starts[:-1],
        scale=DIM**-0.5,
        causal=causal,
        window=window,
        sinks=sinks,
    ).flatten(-2)
    real = torch.cat([torch.arange(width) < length for width, length in zip(widths, lengths, strict=True)])
    cotangent = cotangent * real[:, None]
    learnt = [sinks] if softmax_type == "learnable" else []
    wanted_grads = torch.autograd.grad(wanted, [*inputs, *learnt], cotangent)
    rows = torch.cat([zigzag(start, width) for start, width in zip(starts, widths, strict=False)])
    mine = [tensor.detach()[rows].requires_grad_() for tensor in inputs]
    output = attend(module, mine, lengths, starts)
    torch.testing.assert_close(output[real[rows]], wanted[rows][real[rows]])
    grads = torch.autograd.grad(output, [*mine, *learnt], cotangent[rows])
    for got, expected in zip(grads[:3], wanted_grads[:3], strict=True):
        torch.testing.assert_close(got, expected[rows])
    for got, expected in zip(grads[3:], wanted_grads[3:], strict=True):
        dist.all_reduce(got)  # as Megatron does over data- and context-parallel ranks
        torch.testing.assert_close(got, expected)


def packed(module, inputs, lengths, starts):
    cu_seqlens = torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32)
    cu_padded = torch.tensor(starts, dtype=torch.int32)
    outputs = [
        module(
            *inputs,
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            cu_seqlens_q_padded=cu_padded,
            cu_seqlens_kv_padded=cu_padded,
            attn_mask_type="padding_causal" if module.attn_mask_type == "causal" else "padding",
        )
        for _ in range(2)  # the second layer finds the first one's plan
    ]
    assert torch.equal(*outputs)
    return outputs[0]


def padded(module, inputs, lengths, starts):
    batch = [tensor.unflatten(0, (len(lengths), -1)) for tensor in inputs]
    return module(*batch, qkv_format="bshd").flatten(0, 1)


unit = 2 * size
traits = ((True, None), (True, (3, 0)), (False, None))
for (causal, window), softmax_type in itertools.product(traits, ("vanilla", "off-by-one", "learnable")):
    # Real lengths that fill their chunks, end inside one, and leave whole chunks empty.
    widths = [2 * unit, 3 * unit, unit, 2 * unit]
    check([2 * unit, 3 * unit - 1, 1, unit + 1], widths, causal, window, softmax_type, packed)
    check([3 * unit] * 2, [3 * unit] * 2, causal, window, softmax_type, padded)
dist.barrier()
dist.destroy_process_group()
# Modules of this program still refer to the group; at a regular exit its gloo threads would end in std::terminate.
os._exit(0)
