"""Score tokens with a model, without gradients. Knows no way of building a model."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from anytron.batch import TokenScores
from anytron_megatron.training.schedule import run_micro_batches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from anytron.batch import RaggedBatch
    from anytron.traits import ParallelSizes
    from anytron_megatron.training.micro_batch import BatchPreparer
    from anytron_megatron.training.schedule import ModelChunk, Surroundings


@torch.no_grad()
def token_scores(
    chunks: Sequence[ModelChunk],
    micro_batches: Sequence[RaggedBatch],
    preparer: BatchPreparer,
    *,
    around: Surroundings | None = None,
) -> list[TokenScores]:
    """Compute log-probs and entropies. A collective.

    Args:
        chunks: The model on this rank, wrapped for training or not.
        micro_batches: The same number on every rank.
        preparer: Makes model inputs of a micro-batch.
        around: What goes around forward passes (:func:`anytron_megatron.training.schedule.run_micro_batches`).

    Returns:
        Each micro-batch's, on the host; none except on the last stage.
    """

    def collect(log_probs: Tensor, entropy: Tensor, _: RaggedBatch) -> tuple[Tensor, TokenScores]:
        return log_probs.new_zeros(()), TokenScores(log_probs.cpu(), entropy.cpu())

    _stop_training(chunks)
    return run_micro_batches(chunks, micro_batches, preparer, collect, forward_only=True, around=around)


@torch.no_grad()
def token_values(
    chunks: Sequence[ModelChunk], micro_batches: Sequence[RaggedBatch], preparer: BatchPreparer
) -> list[Tensor]:
    """Compute the values of states, with a model that has a value head. A collective.

    Args:
        chunks: The model on this rank, wrapped for training or not.
        micro_batches: The same number on every rank.
        preparer: Makes model inputs of a micro-batch.

    Returns:
        float32 ``[T]`` for each micro-batch, on the host, entry t of the state before token t; none except on the
        last stage.
    """

    def collect(values: Tensor, batch: RaggedBatch) -> tuple[Tensor, Tensor]:
        del batch
        return values.new_zeros(()), values.cpu()

    _stop_training(chunks)
    return run_micro_batches(chunks, micro_batches, preparer, collect, forward_only=True, read=preparer.state_values)


@torch.no_grad()
def whole_logits(
    chunks: Sequence[ModelChunk],
    micro_batch: RaggedBatch,
    preparer: BatchPreparer,
    *,
    vocab_size: int,
    sizes: ParallelSizes,
) -> list[Tensor]:
    """Compute a micro-batch's whole logits, for comparisons; each rank gathers all of them. A collective.

    Args:
        chunks: The model on this rank, wrapped for training or not.
        micro_batch: The same on every rank of a copy.
        preparer: Makes model inputs of it.
        vocab_size: V, without padding.
        sizes: The parallel sizes.

    Returns:
        float32 ``[T, V]``, on the host, row t after token t, as one entry; none except on the last stage.
    """

    def collect(logits: Tensor, batch: RaggedBatch) -> tuple[Tensor, Tensor]:
        del batch
        return logits.new_zeros(()), logits[:, :vocab_size].float().cpu()

    _stop_training(chunks)
    # Interleaved schedules take multiples of the pipeline's size only.
    repeats = sizes.pipeline if sizes.virtual_pipeline > 1 else 1
    with contextlib.ExitStack() as stack:
        for chunk in chunks:
            if chunk.head is not None:
                stack.enter_context(chunk.head.answering_logits())
        return run_micro_batches(
            chunks, [micro_batch] * repeats, preparer, collect, forward_only=True, read=preparer.unpack
        )[:1]


def _stop_training(chunks: Sequence[ModelChunk]) -> None:
    for chunk in chunks:
        chunk.module.eval()
