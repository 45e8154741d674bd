"""Replace the output layer of a reward model: one number per sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from anytron.sequences.batch import TokenOutputs

if TYPE_CHECKING:
    from torch import Tensor

    from anytron.sequences.batch import RaggedBatch
    from anytron_megatron.training.micro_batch import PreparedBatch


class RewardHead:
    """Evaluate a model's output layer of one row, ``score`` in Hugging Face's files, in float32.

    In bfloat16 a score of 20 would be rounded to a multiple of 1/8, and the scores of a group are close to each other.

    Args:
        layer: The output layer, the same on all tensor-parallel ranks; keeps its weight ``[1, H]`` and its place.
        padding: The padding token of the model's config; None = it has none.
    """

    def __init__(self, layer: Any, padding: int | None) -> None:
        self._layer, self._padding = layer, padding
        layer.forward = self.forward

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **unused: Any) -> tuple[Tensor, None]:
        """Give a score of each position, float32 ``[S, B, 1]``, and the bias that the layer does not have.

        ``hidden`` comes behind the final norm: ``[S, B, H]``, or ``[S / tp, B, H]`` with sequence parallelism, where
        mcore-bridge's model gathers the scores (``mcore_bridge/model/gpt_model.py``, ``_postprocess``).
        """
        del weight, unused
        return nn.functional.linear(hidden.float(), self._layer.weight.float()), None

    def scope(self, prepared: PreparedBatch) -> None:
        """Scores depend on nothing but hidden states: a micro-batch needs no scope here."""

    def token_outputs(self, answers: Tensor, prepared: PreparedBatch) -> TokenOutputs:
        """Choose of answers, float32 ``[T, 1]``, each made at its token, those that stand for sequences."""
        places = scored_places(prepared.batch, self._padding).to(answers.device, non_blocking=True)
        return TokenOutputs(scores=answers.squeeze(-1).index_select(0, places))


def scored_places(batch: RaggedBatch, padding: int | None) -> Tensor:
    """Find the token of each sequence at which its score is read, as transformers does: int64 ``[B]``, flat indices.

    It is the last one that is not the padding token, which may be what ends a response; if there is no other, the first
    (``transformers/modeling_layers.py``, ``GenericForSequenceClassification``).
    """
    ends = torch.cumsum(batch.lengths, 0)
    if padding is None:
        return ends - 1
    index = torch.arange(batch.num_tokens)
    starts = ends - batch.lengths
    sequence = torch.repeat_interleave(torch.arange(batch.num_sequences), batch.lengths)
    candidates = torch.where(batch.tokens != padding, index, starts[sequence])
    return starts.scatter_reduce(0, sequence, candidates, "amax")
