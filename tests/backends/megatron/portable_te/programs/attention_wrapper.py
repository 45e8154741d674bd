"""One rank of Megatron's ``TEDotProductAttention`` on the portable module; compared with the definition in float64.

The two ranks are two copies, then two tensor-parallel ranks, then two context-parallel ones.
"""

import itertools
import os

import torch
import torch.distributed as dist

from anytron.base.traits import ParallelSizes
from anytron.device.hooks.types import PatchContext
from anytron.device.loading import open_session
from anytron.device.patches import Ledger, Phase
from anytron.kernels.oracles.attention import reference_attention

HEADS, GROUPS, DIM = 4, 2, 8
LENGTHS = [8, 5, 11, 1]
STARTS = [0, 8, 16, 28, 32]  # every sequence fills a multiple of 4 rows: two chunks for each of two ranks
# A vision tower: windows and images are segments of one packed sequence, each seen from both sides.
SEGMENTS = [4, 8, 4, 16]
SINKS_AND_WINDOWS = list(itertools.product(("vanilla", "off-by-one", "learnable"), (None, (3, 0))))


def prepare():
    """Patches as in a training rank, then the process group."""
    session = open_session(platform="cpu")
    context = PatchContext(session.platform, "trainer", session.hooks, "megatron")
    ledger = Ledger(context=context)
    for phase in (Phase.BEFORE_IMPORT, Phase.BEFORE_PARALLEL_INIT):
        ledger.apply(phase, session.hooks.patch_model(phase, context))
    torch.set_num_threads(1)
    from anytron_megatron.training.parallel import initialize

    initialize(session.platform.runtime(), ParallelSizes(data=2), seed=1, timeout_s=60)


def attention(softmax_type, window, sizes, *, causal):
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        softmax_type=softmax_type,
        window_size=window,
        attention_dropout=0.0,
        tensor_model_parallel_size=sizes.tensor,
        context_parallel_size=sizes.context,
    )
    mask_type = AttnMaskType.causal if causal else AttnMaskType.no_mask
    return TEDotProductAttention(config, 1, mask_type, "self").double(), mask_type


def packed(lengths, starts):
    from megatron.core.packed_seq_params import PackedSeqParams

    real = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    padded = torch.tensor(starts, dtype=torch.int32)
    return PackedSeqParams("thd", real, real, padded, padded, max(lengths), max(lengths))


def definition(inputs, lengths, starts, **traits):
    return reference_attention(
        *inputs, lengths=lengths, starts=starts[:-1], key_starts=starts[:-1], scale=DIM**-0.5, **traits
    ).flatten(-2)


class Share:
    """This rank's part of tensors over all rows and heads."""

    def __init__(self, sizes, starts):
        self.rank, self.sizes = dist.get_rank(), sizes
        self.rows = torch.arange(starts[-1])
        if sizes.context > 1:
            chunks = [torch.arange(a, b).chunk(2 * sizes.context) for a, b in itertools.pairwise(starts)]
            mine = [pieces[index] for pieces in chunks for index in (self.rank, 2 * sizes.context - 1 - self.rank)]
            self.rows = torch.cat(mine)

    def of_heads(self, tensor, dim=0):
        return tensor.chunk(self.sizes.tensor, dim)[self.rank if self.sizes.tensor > 1 else 0].detach()

    def of(self, tensor):
        return self.of_heads(tensor[self.rows], 1)


def check(lengths, starts, sizes, *, causal, softmax_type="vanilla", window=None):
    """Outputs and gradients of this rank's part; give the module."""
    module, mask_type = attention(softmax_type, window, sizes, causal=causal)
    generator = torch.Generator().manual_seed(0)
    shapes = [(starts[-1], heads, DIM) for heads in (HEADS, GROUPS, GROUPS)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    cotangent = torch.randn(starts[-1], HEADS * DIM, generator=generator, dtype=torch.float64)
    sinks, learnt = None, []
    if softmax_type != "vanilla":
        sinks = torch.zeros(HEADS, dtype=torch.float64)
    if softmax_type == "learnable":
        learnt = [torch.nn.init.normal_(sinks, generator=generator).requires_grad_()]
    want = definition(inputs, lengths, starts, causal=causal, window=window, sinks=sinks)
    want_grads = torch.autograd.grad(want, [*inputs, *learnt], cotangent)

    share = Share(sizes, starts)
    own = [share.of(operand).requires_grad_() for operand in inputs]
    own_learnt = [module.softmax_offset] if learnt else []
    if learnt:
        module.softmax_offset.data.copy_(share.of_heads(sinks))
    output = module(*own, None, mask_type, packed_seq_params=packed(lengths, starts))
    torch.testing.assert_close(output, share.of(want))
    grads = torch.autograd.grad(output, [*own, *own_learnt], share.of(cotangent))
    for got, expected in zip(grads[:3], want_grads[:3], strict=True):
        torch.testing.assert_close(got, share.of(expected))
    for got, expected in zip(grads[3:], want_grads[3:], strict=True):
        if sizes.context > 1:
            dist.all_reduce(got)  # as Megatron does over data- and context-parallel ranks
        torch.testing.assert_close(got, share.of_heads(expected))
    return module


def check_padded():
    """Sequence first and without packing; a sink that is off by a little is noticed."""
    module, mask_type = attention("learnable", (3, 0), ParallelSizes(), causal=True)
    generator = torch.Generator().manual_seed(1)
    shapes = [(6, 2, heads, DIM) for heads in (HEADS, GROUPS, GROUPS)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    flat = [operand.transpose(0, 1).flatten(0, 1) for operand in inputs]
    want = definition(flat, [6, 6], [0, 6, 12], window=(3, 0), sinks=module.softmax_offset)
    got = module(*inputs, None, mask_type).transpose(0, 1).flatten(0, 1)
    torch.testing.assert_close(got, want)
    module.softmax_offset.data[0] += 0.01
    assert not torch.allclose(module(*inputs, None, mask_type).transpose(0, 1).flatten(0, 1), want)


def check_layout(sizes):
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor, context_parallel_size=sizes.context
    )
    check(SEGMENTS, [0, *itertools.accumulate(SEGMENTS)], sizes, causal=False)
    for softmax_type, window in SINKS_AND_WINDOWS:
        module = check(LENGTHS, STARTS, sizes, causal=True, softmax_type=softmax_type, window=window)
    # The learnt sinks of the last module in Megatron's distributed checkpoint: split by heads.
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    (entry,) = module.sharded_state_dict(metadata=metadata).values()
    assert entry.global_shape == (HEADS,)
    assert entry.global_offset == (dist.get_rank() * HEADS // 2 if sizes.tensor == 2 else 0,)


def main():
    prepare()
    check_padded()
    for sizes in (ParallelSizes(data=2), ParallelSizes(tensor=2), ParallelSizes(context=2)):
        check_layout(sizes)
    print("equal", flush=True)  # what is buffered would go with os._exit
    dist.barrier()
    os._exit(0)  # gloo's threads would outlive the groups that modules still hold


if __name__ == "__main__":
    main()
