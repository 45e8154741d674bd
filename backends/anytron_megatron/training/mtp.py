"""Train a model's multi-token prediction modules beside the policy.

DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 2.2) has modules behind its last layer that
predict tokens further ahead, for speculative decoding. Depth d joins the hidden state of depth d - 1
at position i with the embedding of token i + d, runs both through a layer of its own, and the shared
output layer predicts token i + d + 1. If the policy is trained and the modules are not, their predictions get
worse; if they are trained on the policy's responses, they keep up with it.

The loss of a depth is the cross entropy (equation 24). Tokens have the weights of the policy's loss,
whatever their advantages; depths are averaged (equation 25). Logits are divided by the sampling
temperature: tokens were drawn from that distribution.

Megatron's own loop (``megatron/core/transformer/multi_token_prediction.py``) shifts tokens inside the
model. It cuts packed sequences at their real lengths, while ours are cut at padded ones, and mcore-bridge's
loop rotates positions across the shards of context parallelism. Here the layout gives each depth its
tokens, and positions stay: attention with rotary embeddings sees only their differences.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from anytron.algorithms.contract import LossOutputs
from anytron_megatron.training.heads import TokenScoreHead

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
    from torch import Tensor, nn

    from anytron.algorithms.contract import LossFunction
    from anytron.sequences.batch import RaggedBatch, TokenOutputs
    from anytron.sequences.scopes import ScopeFactory
    from anytron_megatron.training.micro_batch import PreparedBatch
    from anytron_megatron.training.schedule import ModelChunk

_SHARED = ("attention_mask", "rotary_pos_emb", "packed_seq_params", "padding_mask")
"""Arguments of the decoder that the modules' layers take as well."""


class MultiTokenPrediction:
    """Computes the log-probs and the loss of a model's multi-token prediction modules in updates.

    Args:
        chunks: The policy on this rank; the multi-token prediction modules are at the end of the last pipeline stage.
        coefficient: Weight of the loss; 0 = the model was built without modules.
        detach: Whether gradients reach the modules only, and neither the rest of the model nor the embedding and the
            output layer that the modules share with it.
    """

    def __init__(self, chunks: Sequence[ModelChunk], *, coefficient: float, detach: bool) -> None:
        self._coefficient = coefficient
        self._detach = detach
        self._computes = False
        for chunk in chunks:
            if coefficient > 0.0 and isinstance(chunk.head, TokenScoreHead):
                hook = partial(self._predict, chunk.module, chunk.head)
                chunk.module.decoder.register_forward_hook(hook, with_kwargs=True)

    def scope(self, chunk: int, prepared: PreparedBatch) -> ScopeFactory | None:
        """Make the scope in which a forward pass also computes the modules' log-probs; None if the coefficient is 0."""
        del chunk, prepared
        return self._computing if self._coefficient > 0.0 else None

    def add_loss(
        self, loss_fn: LossFunction, outputs: TokenOutputs, batch: RaggedBatch, coefficient: float | None = None
    ) -> LossOutputs:
        """Compute the policy's loss plus ``coefficient`` times the modules' loss.

        The metric ``mtp/loss`` is this micro-batch's part of the modules' loss. ``coefficient``: None = the run's; 0 =
        the modules compute as usual and get gradients of 0.
        """
        policy = loss_fn(outputs, batch)
        if not outputs.predicted:
            return policy
        assert batch.loss_weights is not None
        loss = -torch.stack([torch.sum(batch.loss_weights * log_probs) for log_probs in outputs.predicted]).mean()
        metrics = {**policy.metrics, "mtp/loss": loss.detach()}
        weight = self._coefficient if coefficient is None else coefficient
        return LossOutputs(policy.loss + weight * loss, metrics)

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        self._computes = True
        try:
            yield
        finally:
            self._computes = False

    def _predict(
        self,
        model: GPTModel,
        head: TokenScoreHead,
        decoder: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        hidden: Tensor,
    ) -> None:
        """Predict from the decoder's output ``hidden``, ``[S, B, H]``; called by a hook of the decoder."""
        del decoder, args
        if not self._computes:
            return
        tied = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        if self._detach:
            weight, hidden = weight.detach(), hidden.detach().requires_grad_()  # recomputation needs an input with one
        for depth, layer in enumerate(model.mtp.layers, start=1):
            tokens = head.following(depth).clamp(min=0)  # positions without such a token have no label either
            embedded = model.embedding(input_ids=tokens, position_ids=None)
            hidden = _run(layer, hidden, embedded.detach() if self._detach else embedded, kwargs)
            head.predict(hidden, head.following(depth + 1), weight)


def _run(
    layer: MultiTokenPredictionLayer, hidden: Tensor, embedded: Tensor, decoder_arguments: Mapping[str, Any]
) -> Tensor:
    """Run one module: norms, projection, transformer layer and final norm, recomputed if layers are."""
    recomputes = layer.config.recompute_granularity == "full" and layer.training
    compute = layer._checkpointed_forward if recomputes else layer._proj_and_transformer_layer
    given = {name: decoder_arguments[name] for name in _SHARED if decoder_arguments.get(name) is not None}
    predicted: Tensor = compute(hidden_states=hidden, decoder_input=embedded, **given)
    return predicted
