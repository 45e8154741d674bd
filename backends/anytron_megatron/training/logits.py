"""Compute whole logits, for comparisons with another computation. No pass of a training step makes them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from anytron_megatron.training.schedule import forward
from anytron_megatron.training.token_score_head import TokenScoreHead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from anytron.base.traits import ParallelSizes
    from anytron.sequences.batch import RaggedBatch
    from anytron_megatron.training.micro_batch import BatchPreparer
    from anytron_megatron.training.schedule import ModelChunk


def whole_logits(
    chunks: Sequence[ModelChunk],
    micro_batch: RaggedBatch,
    preparer: BatchPreparer,
    *,
    vocab_size: int,
    sizes: ParallelSizes,
) -> Tensor | None:
    """Compute a micro-batch's whole logits; each rank gathers all of them. A collective.

    The micro-batch is the same on every rank of a data-parallel replica; ``vocab_size`` is without padding.

    Returns:
        float32 ``[T, V]``, on the host, row t after token t; None except on the last pipeline stage.
    """
    # Interleaved schedules take multiples of the pipeline's size only.
    repeats = sizes.pipeline if sizes.virtual_pipeline > 1 else 1
    with contextlib.ExitStack() as stack:
        for chunk in chunks:
            if isinstance(chunk.head, TokenScoreHead):
                stack.enter_context(chunk.head.answering_logits())
        outputs = forward(chunks, [micro_batch] * repeats, preparer)
    if not outputs or outputs[0].logits is None:
        return None
    return outputs[0].logits[:, :vocab_size].float()
