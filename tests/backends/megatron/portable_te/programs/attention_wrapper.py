"""One rank of Megatron's ``TEDotProductAttention`` on the portable module; compared with the definition in float64.

The two ranks are two copies, then two tensor-parallel ranks, then two context-parallel ones.
"""

import itertools
import os

import torch

from anytron.hooks.types import PatchContext
from anytron.masks import ParallelSizes
from anytron.patches import Ledger, Phase
from anytron.plugins import open_session
from anytron.testing.attention import reference_attention

HEADS, GROUPS, DIM = 4, 2, 8
LENGTHS = [8, 5, 11, 1]
STARTS = [0, 8, 16, 28, 32]  # every sequence fills a multiple of 4 rows: two chunks for each of two ranks
SEGMENTS = [4, 9, 2, 17]


def reference(inputs, lengths, starts, **traits):
    return reference_attention(
        *inputs, lengths=lengths, starts=starts[:-1], key_starts=starts[:-1], scale=DIM**-0.5, **traits
    ).flatten(-2)


def main():
    session = open_session(platform="cpu")
    context = PatchContext(platform=session.platform, role="trainer", hooks=session.hooks)
    ledger = Ledger()
    for phase in (Phase.BEFORE_IMPORT, Phase.BEFORE_PARALLEL_INIT):
        ledger.apply(phase, session.hooks.patch_model(phase, context))

    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from anytron_megatron.parallel import initialize

    torch.set_num_threads(1)
    initialize(session.platform.runtime(), ParallelSizes(data=2), seed=1, timeout_s=60)
    rank = dist.get_rank()

    def attention(softmax_type, window, tensor, context, mask_type):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=HEADS * DIM,
            num_attention_heads=HEADS,
            num_query_groups=GROUPS,
            softmax_type=softmax_type,
            window_size=window,
            attention_dropout=0.0,
            tensor_model_parallel_size=tensor,
            context_parallel_size=context,
        )
        return TEDotProductAttention(config, 1, mask_type, "self").double()

    def params(lengths, starts):
        real = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        padded = torch.tensor(starts, dtype=torch.int32)
        return PackedSeqParams("thd", real, real, padded, padded, max(lengths), max(lengths))

    def check(lengths, starts, *, causal, softmax_type="vanilla", window=None, tensor=1, context=1):
        mask_type = AttnMaskType.causal if causal else AttnMaskType.no_mask
        module = attention(softmax_type, window, tensor, context, mask_type)
        generator = torch.Generator().manual_seed(0)
        shapes = [(starts[-1], heads, DIM) for heads in (HEADS, GROUPS, GROUPS)]
        inputs = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
        sinks = None if softmax_type == "vanilla" else torch.zeros(HEADS, dtype=torch.float64)
        learnt = softmax_type == "learnable"
        if learnt:
            sinks = torch.randn(HEADS, generator=generator, dtype=torch.float64).requires_grad_()
        cotangent = torch.randn(starts[-1], HEADS * DIM, generator=generator, dtype=torch.float64)
        leaves = [*inputs, sinks] if learnt else inputs
        want = reference(inputs, lengths, starts, causal=causal, window=window, sinks=sinks)
        want_grads = torch.autograd.grad(want, leaves, cotangent)

        rows = torch.arange(starts[-1])
        if context > 1:
            chunks = [torch.arange(a, b).chunk(2 * context) for a, b in itertools.pairwise(starts)]
            rows = torch.cat([torch.cat([pieces[rank], pieces[2 * context - 1 - rank]]) for pieces in chunks])

        def mine(tensor_, dim):
            return tensor_.chunk(tensor, dim)[rank if tensor > 1 else 0].detach()

        own = [mine(operand[rows], 1).requires_grad_() for operand in inputs]
        if learnt:
            module.softmax_offset.data.copy_(mine(sinks, 0))
        output = module(*own, None, mask_type, packed_seq_params=params(lengths, starts))
        torch.testing.assert_close(output, mine(want[rows], 1))
        own_leaves = [*own, module.softmax_offset] if learnt else own
        grads = torch.autograd.grad(output, own_leaves, mine(cotangent[rows], 1))
        for got, expected in zip(grads[:3], want_grads[:3], strict=True):
            torch.testing.assert_close(got, mine(expected[rows], 1))
        if learnt:
            if context > 1:
                dist.all_reduce(grads[3], group=parallel_state.get_context_parallel_group())
            torch.testing.assert_close(grads[3], mine(want_grads[3], 0))
        return module

    softmax_types, windows = ("vanilla", "off-by-one", "learnable"), (None, (3, 0))
    for softmax_type, window in itertools.product(softmax_types, windows):
        check(LENGTHS, STARTS, causal=True, softmax_type=softmax_type, window=window)
    # A vision tower: windows and images are segments of one packed sequence, each seen from both sides.
    cumulative = [0, *itertools.accumulate(SEGMENTS)]
    check(SEGMENTS, cumulative, causal=False)

    # Padded, sequence first, as Megatron calls it without packing.
    module = attention("learnable", (3, 0), 1, 1, AttnMaskType.causal)
    generator = torch.Generator().manual_seed(1)
    padded = [torch.randn(6, 2, heads, DIM, generator=generator, dtype=torch.float64) for heads in (HEADS, GROUPS, GROUPS)]
    flat = [operand.transpose(0, 1).flatten(0, 1) for operand in padded]
    want = reference(flat, [6, 6], [0, 6, 12], window=(3, 0), sinks=module.softmax_offset)
    got = module(*padded, None, AttnMaskType.causal)
    torch.testing.assert_close(got.transpose(0, 1).flatten(0, 1), want)

    for sizes in (ParallelSizes(tensor=2), ParallelSizes(context=2)):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor, context_parallel_size=sizes.context
        )
        layout = {"tensor": sizes.tensor, "context": sizes.context}
        for softmax_type, window in itertools.product(softmax_types, windows):
            module = check(LENGTHS, STARTS, causal=True, softmax_type=softmax_type, window=window, **layout)
        segments = [4, 8, 4, 16]
        check(segments, [0, *itertools.accumulate(segments)], causal=False, **layout)
        # The learnt sinks of the last module in Megatron's distributed checkpoint: split by heads.
        sharded = module.sharded_state_dict(metadata={"dp_cp_group": parallel_state.get_data_parallel_group(True)})
        (entry,) = sharded.values()
        assert entry.global_shape == (HEADS,), entry
        assert entry.global_offset == (rank * HEADS // 2 if sizes.tensor == 2 else 0,), entry
    print("equal")
    dist.barrier()
    os._exit(0)  # gloo's threads would outlive the groups that modules still hold


if __name__ == "__main__":
    main()
