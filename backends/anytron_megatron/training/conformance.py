"""Check that the platform's attention, with the platform's mask, computes the definition of attention.

With portable modules the check uses the engine's own code: a micro-batch is prepared through the hooks, and an
attention module is called inside its scope. To find which tokens attend to which, one key and its value are changed at
a time; the queries whose outputs change attend to that key. So no kernel mode has to be known by name. Values and
gradients are compared with float64.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from anytron.kernels.oracles.attention import LENGTHS, TOLERANCE, described, drawn_operands, largest_difference
from anytron.kernels.oracles.masks import defined_pairs, influence, read_transformer_engine, wrong_companion
from anytron.run.preflight.limits import NotPossible, adapted
from anytron.sequences import scopes
from anytron.sequences.batch import RaggedBatch
from anytron.sequences.layout import ContextShard
from anytron.workers.engines.training_engine import Conformance
from anytron_megatron.portable_te.pytorch.attention.dot_product_attention import DotProductAttention

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from anytron.base.traits import AttentionHeads, ParallelSizes
    from anytron.config.schema import RunConfig
    from anytron.device.loading import Session
    from anytron.kernels.oracles.masks import Attend
    from anytron.sequences.layout import Format, SequenceLayout
    from anytron.sequences.masks import Pair
    from anytron_megatron.training.micro_batch import BatchPreparer, PreparedBatch


def possible_formats(config: RunConfig, session: Session) -> Iterator[Format]:
    """Yield the configured sequence format, and the other one if the platform and the plugins allow it."""
    own = config.engine.sequence_format
    yield own
    other: Format = "bshd" if own == "thd" else "thd"
    changed = config.model_copy(update={"engine": config.engine.model_copy(update={"sequence_format": other})})
    with contextlib.suppress(NotPossible):
        adapted(changed, session, "engine.sequence_format", lambda one: one.engine.sequence_format)
        yield other


def kernel_conformance(
    preparers: Iterable[BatchPreparer],
    *,
    heads: AttentionHeads,
    sizes: ParallelSizes,
    dtype: torch.dtype,
    device: torch.device,
) -> Conformance:
    """Compare the platform's attention kernel, called as portable modules call it, with the definition. A collective.

    There is one preparer for each sequence format to check; its layouts should have padding between sequences. Queries,
    keys and values have the run's ``dtype``, because kernels for other types differ or are missing.
    """
    difference, details = 0.0, []
    own = replace(heads, heads=heads.heads // sizes.tensor, kv_heads=max(1, heads.kv_heads // sizes.tensor))
    operands = drawn_operands(own, dtype)
    for preparer in preparers:
        prepared = preparer.prepare(_batch())
        layout = prepared.inputs.layout
        with scopes.enter(prepared.scope()):
            attend = _attention(prepared, preparer, heads, sizes)
            wrong = influence(attend, operands, layout, device) ^ _expected(preparer, layout)
            rounding = largest_difference(attend, operands, layout, scale=own.qk_dim**-0.5, traits=preparer.traits)
        companion = wrong_companion(prepared.mask, layout, preparer.traits)
        difference = max(difference, float(len(wrong)), rounding, float(bool(companion)))
        details.append(f"{layout.format} '{prepared.mask.kernel_mode}' {described(wrong)}, {rounding:.1e}")
        details += [f"but {companion.rstrip('.')}"] if companion else []
    details.append(f"{own.heads}/{own.kv_heads} heads of {own.qk_dim}/{own.v_dim}, {dtype}")
    return Conformance(difference, TOLERANCE[dtype], "; ".join(details))


def mask_conformance(preparer: BatchPreparer, sizes: ParallelSizes) -> Conformance:
    """Compare the platform's mask for a vendor's attention modules with the definition, for each pair of tokens.

    The pairs come from ``AttnMask.reader``. Without a reader, the mask's kernel mode is read as Transformer Engine's
    ``attn_mask_type``.
    """
    lengths = torch.tensor(LENGTHS)
    layouts = [preparer.plan(lengths, ContextShard(sizes.context, rank)) for rank in range(sizes.context)]
    mask = preparer.mask_of(layouts[0])
    found = (mask.reader or read_transformer_engine)(mask, layouts, preparer.traits)
    wrong = found ^ defined_pairs(LENGTHS, preparer.traits)
    companion = wrong_companion(mask, layouts[0], preparer.traits)
    detail = f"{layouts[0].format} '{mask.kernel_mode}', read pair by pair, {described(wrong)}"
    detail += f"; but {companion.rstrip('.')}" if companion else ""
    return Conformance(float(len(wrong)) + bool(companion), 0.0, detail)


def _batch() -> RaggedBatch:
    total = sum(LENGTHS)
    return RaggedBatch(
        lengths=torch.tensor(LENGTHS),
        tokens=torch.zeros(total, dtype=torch.int64),
        response_mask=torch.ones(total, dtype=torch.bool),
    )


def _attention(prepared: PreparedBatch, preparer: BatchPreparer, heads: AttentionHeads, sizes: ParallelSizes) -> Attend:
    """The model's attention on operands as they lie in the layout: ``[R, C, H, D]`` -> ``[R, C, H, Dv]``."""
    causal, packed, layout = preparer.traits.causal, prepared.packed, prepared.inputs.layout
    module = DotProductAttention(
        heads.heads,
        (heads.qk_dim, heads.v_dim),
        num_gqa_groups=max(heads.kv_heads, sizes.tensor),
        attn_mask_type="causal" if causal else "no_mask",
        window_size=preparer.traits.window,
        tp_size=sizes.tensor,
        cp_group=layout.shard.group,
    )

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if packed is None:
            output = module(query, key, value, qkv_format="bshd")
        else:
            output = module(
                *(operand[0] for operand in (query, key, value)),
                qkv_format="thd",
                attn_mask_type="padding_causal" if causal else "padding",
                cu_seqlens_q=packed.cu_seqlens_q,
                cu_seqlens_kv=packed.cu_seqlens_kv,
                cu_seqlens_q_padded=packed.cu_seqlens_q_padded,
                cu_seqlens_kv_padded=packed.cu_seqlens_kv_padded,
                max_seqlen_q=packed.max_seqlen_q,
                max_seqlen_kv=packed.max_seqlen_kv,
            )[None]
        attended: Tensor = output.unflatten(-1, (query.shape[-2], value.shape[-1]))
        return attended

    return attend


def _expected(preparer: BatchPreparer, layout: SequenceLayout) -> set[Pair]:
    """The pairs of the definition whose queries this rank holds."""
    held = set(layout.token_index.tolist())
    return {pair for pair in defined_pairs(LENGTHS, preparer.traits) if pair[0] in held}
