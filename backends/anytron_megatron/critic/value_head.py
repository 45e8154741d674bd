"""Replace the output layer of a critic: one value per state, never whole logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import nn

from anytron.sequences.batch import TokenOutputs

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from torch import Tensor

    from anytron_megatron.training.micro_batch import PreparedBatch


class ValueHead(nn.Module):
    """Replace the forward of a model's output layer by a linear layer of one output and no bias.

    Its weight is float32 whatever the model's dtype, and the same on all tensor-parallel ranks. It begins as
    zero: the first advantages are then the plain outcomes, not the noise of a random layer, and no parallel
    layout draws other numbers. The trunk learns from the second update on.

    The model's own output layer keeps its place and, where it is not tied to the embedding, its weight, frozen:
    no gradient buffer and no optimizer state, and the model can be written as it was read.

    Args:
        model: A chunk of the last pipeline stage, with its weights, not wrapped for training. Becomes the
            owner of the head, as ``model.value_head``.
    """

    def __init__(self, model: GPTModel) -> None:
        super().__init__()
        layer, config = model.output_layer, model.config
        self._sequence_parallel = layer.sequence_parallel
        device = next(model.parameters()).device
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=torch.float32, device=device))
        # With sequence parallelism each rank evaluates the positions it has, and its gradient is of these only:
        # Megatron adds the gradients of parameters with this mark over tensor-parallel ranks
        # (megatron/core/distributed/finalize_model_grads.py).
        self.weight.sequence_parallel = self._sequence_parallel  # type: ignore[attr-defined]
        if not model.share_embeddings_and_output_weights:
            layer.requires_grad_(False)
        layer.forward = self.forward
        model.value_head = self

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **unused: Any) -> tuple[Tensor, None]:
        """Give the values, float32 ``[S, B, 1]``, and the bias that output layers do not have.

        ``hidden`` comes behind the final norm: ``[S, B, H]``, or ``[S / tp, B, H]`` with sequence parallelism.
        """
        del weight, unused
        values = nn.functional.linear(hidden.float(), self.weight)
        if self._sequence_parallel:
            # Every rank computes the same loss of all values: none has a part of their gradient to add.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None

    def scope(self, prepared: PreparedBatch) -> None:
        """Values depend on nothing but hidden states: a micro-batch needs no scope here."""

    def token_outputs(self, answers: Tensor, prepared: PreparedBatch) -> TokenOutputs:
        """Bring values, float32 ``[T, 1]``, each of the state after its token, to token coordinates."""
        lengths = prepared.batch.lengths
        starts = (torch.cumsum(lengths, 0) - lengths).to(answers.device, non_blocking=True)
        return TokenOutputs(values=torch.roll(answers.squeeze(-1), 1).index_fill(0, starts, 0.0))
