"""Ask a model that is never updated: the teacher of distillation, a reward model. Does not build models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron_megatron.training import parallel
from anytron_megatron.training.schedule import forward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from anytron.sequences.batch import RaggedBatch, TokenOutputs
    from anytron_megatron.training.micro_batch import BatchPreparer
    from anytron_megatron.training.schedule import ModelChunk


class FrozenModel:
    """A model without gradient buffers and optimizer.

    Args:
        chunks: The model on this rank, its modules as they were built.
        preparer: Makes inputs of this model; the policy's makes them of another.
    """

    def __init__(self, chunks: Sequence[ModelChunk], preparer: BatchPreparer) -> None:
        self._chunks, self._preparer = chunks, preparer
        for module in self.modules:
            module.requires_grad_(False)

    def score(self, micro_batches: Sequence[RaggedBatch]) -> list[TokenOutputs] | None:
        """Compute what the model's heads give (``TrainingEngine.score``)."""
        outputs = forward(self._chunks, micro_batches, self._preparer)
        return outputs if parallel.topology().reports else None

    @property
    def modules(self) -> list[nn.Module]:
        """Its chunks."""
        return [chunk.module for chunk in self._chunks]
