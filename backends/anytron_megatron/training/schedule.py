"""Run micro-batches through Megatron's pipeline schedules."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.core.pipeline_parallel import get_forward_backward_func

from anytron.sequences import scopes
from anytron_megatron.training.current_mask import scope_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from torch import Tensor

    from anytron.batch import RaggedBatch
    from anytron.sequences.scopes import ScopeFactory
    from anytron_megatron.training.micro_batch import BatchPreparer, PreparedBatch
    from anytron_megatron.training.token_score_head import TokenScoreHead

    Consumer = Callable[..., tuple[Tensor, Any]]
    Surroundings = Callable[[int, PreparedBatch], ScopeFactory | None]
    Reader = Callable[[Tensor, PreparedBatch], tuple[Tensor, ...]]


@dataclass(frozen=True)
class ModelChunk:
    """One pipeline stage's part of a model on this rank.

    Attributes:
        module: What runs: the model, or its data-parallel wrapper.
        head: Scores tokens, on the last stage; None elsewhere, and where the module has a value head.
    """

    module: torch.nn.Module
    head: TokenScoreHead | None


def run_micro_batches(
    chunks: Sequence[ModelChunk],
    micro_batches: Sequence[RaggedBatch],
    preparer: BatchPreparer,
    consume: Consumer,
    *,
    forward_only: bool,
    around: Surroundings | None = None,
    read: Reader | None = None,
) -> list[Any]:
    """Run forward, and unless ``forward_only`` backward, over all micro-batches.

    Args:
        chunks: The model on this rank, in order.
        micro_batches: The same number on every rank.
        preparer: Makes model inputs of a micro-batch.
        consume: Called on the last stage with log-probs and entropies, float32 ``[T]``, token
            coordinates, what multi-token prediction adds to them, and the micro-batch; returns the loss
            (scalar, what Megatron averages over micro-batches and data-parallel ranks) and whatever is to
            be collected.
        forward_only: Compute no gradients.
        around: Given the number of a chunk and a micro-batch, makes a scope for that chunk's forward pass
            of it, and for its recomputations.
        read: Brings the last stage's output back to tokens, as the values that ``consume`` is called
            with before the micro-batch; default: the preparer's log-probs and entropies.

    Returns:
        What ``consume`` collected for each micro-batch, in order; empty except on the last stage.
    """
    numbers = {id(chunk.module): number for number, chunk in enumerate(chunks)}
    bring_back = preparer.flatten if read is None else read

    def finish(output: Tensor, *, prepared: PreparedBatch) -> tuple[Tensor, Any]:
        return consume(*bring_back(output, prepared), prepared.batch)

    def forward_step(
        batches: Iterator[RaggedBatch], module: torch.nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Any]]]:
        prepared = preparer.prepare(next(batches))
        number = numbers[id(module)]
        inputs, head = prepared.inputs, chunks[number].head
        more = around(number, prepared) if around is not None else None
        arguments = {
            "input_ids": inputs.input_ids,
            "position_ids": inputs.position_ids,
            "attention_mask": prepared.mask.for_model(),
            "packed_seq_params": prepared.packed,
            **inputs.extra,
        }
        with scopes.enter(scopes.combine(inputs.scope, scope_of(prepared.mask), more)):
            if head is None:
                output = module(**arguments)
            else:
                with head.scoring(inputs.labels, prepared.batch.temperature, prepared.following):
                    output = module(**arguments)
        return output, partial(finish, prepared=prepared)

    collected: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(micro_batches) for _ in chunks],
        model=[chunk.module for chunk in chunks],
        num_microbatches=len(micro_batches),
        # Shapes vary from micro-batch to micro-batch: pipeline stages tell each other the real ones
        # (variable_seq_lengths), and these two are not used.
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return collected
