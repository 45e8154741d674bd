"""The loss of supervised fine-tuning, from log-probs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from anytron.algorithms.contract import LossOutputs, required

if TYPE_CHECKING:
    from anytron.sequences.batch import RaggedBatch, TokenOutputs

OWNER = "SupervisedLoss"


@dataclass(frozen=True)
class SupervisedLoss:
    """Cross-entropy with the responses of the data: the negative log-prob of each of their tokens. Picklable.

    Over the response tokens of a mini-batch, with the weights of ``algorithm.aggregation``::

        -sum of weight * log p(token | those before it)

    With ``token-mean`` that is what Hugging Face's models compute of ``labels`` that are -100 outside of responses.
    """

    def __call__(self, outputs: TokenOutputs, batch: RaggedBatch) -> LossOutputs:
        """Compute one micro-batch's part of the loss.

        Args:
            outputs: With ``log_probs`` and ``entropy``.
            batch: The micro-batch on the same device, with ``loss_weights`` and ``token_shares``.

        Raises:
            DataError: A field that the loss needs is missing.
        """
        weights = required(batch.loss_weights, "loss_weights", OWNER)
        shares = required(batch.token_shares, "token_shares", OWNER)
        log_probs = torch.where(batch.response_mask, required(outputs.log_probs, "log_probs", OWNER), 0.0)
        entropy = torch.where(batch.response_mask, required(outputs.entropy, "entropy", OWNER), 0.0)
        loss = -torch.sum(weights * log_probs)
        metrics = {
            "loss/total": loss,
            "loss/nll": -torch.sum(shares * log_probs),
            "policy/entropy": torch.sum(shares * entropy),
        }
        return LossOutputs(loss=loss, metrics={name: value.detach() for name, value in metrics.items()})
