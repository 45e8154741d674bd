"""The clipped loss of PPO's critic, from values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from anytron.algorithms.contract import LossOutputs, required

if TYPE_CHECKING:
    from anytron.sequences.batch import RaggedBatch, TokenOutputs


@dataclass(frozen=True)
class ValueLoss:
    """Half of the squared error of a critic's values, clipped as PPO's code does it. Picklable.

    Per token, with the value ``V`` and what it was before the step's updates, ``V_old``::

        0.5 * max((V - return)^2, (clip(V, V_old - clip, V_old + clip) - return)^2)

    A value that has moved by more than ``clip`` in the right direction gains nothing by moving on
    (https://github.com/openai/baselines, baselines/ppo2/model.py; the paper does not mention it).

    Attributes:
        clip: How far a value may move in a step; 0 = no limit.
    """

    clip: float = 0.5

    def __call__(self, outputs: TokenOutputs, batch: RaggedBatch) -> LossOutputs:
        """Compute one micro-batch's part of the loss.

        Args:
            outputs: With ``values``.
            batch: The micro-batch on the same device, with ``values``, ``returns``, ``loss_weights`` and
                ``token_shares``.

        Raises:
            DataError: A field that the loss needs is missing.
        """
        values = required(outputs.values, "values", "ValueLoss")
        old = required(batch.values, "values", "ValueLoss")
        returns = required(batch.returns, "returns", "ValueLoss")
        weights = required(batch.loss_weights, "loss_weights", "ValueLoss")
        shares = required(batch.token_shares, "token_shares", "ValueLoss")

        error = (values - returns).square()
        limited = torch.zeros_like(batch.response_mask)
        if self.clip > 0.0:
            clipped = (torch.clamp(values, old - self.clip, old + self.clip) - returns).square()
            limited = clipped > error
            error = torch.maximum(error, clipped)
        loss = 0.5 * torch.sum(weights * error)
        metrics = {
            "critic/loss": loss,
            "critic/value_mean": torch.sum(shares * values),
            "critic/return_mean": torch.sum(shares * returns),
            "critic/clip_fraction": torch.sum(shares * limited),
        }
        return LossOutputs(loss=loss, metrics={name: value.detach() for name, value in metrics.items()})
