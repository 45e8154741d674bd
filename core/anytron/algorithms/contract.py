"""What advantage estimators and losses are given, and what they return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from anytron.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from anytron.batch import RaggedBatch, TokenOutputs
    from anytron.config.schema import AlgorithmSection


@dataclass(frozen=True)
class Advantages:
    """What an estimator makes of a step's rewards.

    Attributes:
        per_token: float32 ``[T]``, 0 outside of responses.
        returns: float32 ``[T]``, what the critic's values should have been; None without a critic.
    """

    per_token: Tensor
    returns: Tensor | None = None


class AdvantageFunction(Protocol):
    """An estimator: a function that ``algorithm.advantage`` names."""

    def __call__(
        self, batch: RaggedBatch, rewards: Tensor, algorithm: AlgorithmSection, group_size: int, /
    ) -> Advantages:
        """Estimate the advantages of a step's samples.

        Args:
            batch: B sequences, those of one prompt side by side; with ``values`` if there is a critic.
            rewards: float32 ``[B]``, finite: a function of the user's is given no prompt of which a sample was
                dropped (``rewards[].on_error``).
            algorithm: Settings.
            group_size: Samples of one prompt.
        """


@dataclass(frozen=True)
class LossOutputs:
    """One micro-batch's part of the loss and of the metrics.

    Attributes:
        loss: Scalar, differentiable. The parts of all micro-batches and data-parallel ranks add up
            to the mini-batch's loss.
        metrics: Scalars without gradient, float32, on the loss's device; they add up in the same way.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]


class LossFunction(Protocol):
    """Computes a loss. It travels to the training ranks, so it must be picklable."""

    def __call__(self, outputs: TokenOutputs, batch: RaggedBatch) -> LossOutputs:
        """Compute one micro-batch's part of the loss.

        Args:
            outputs: What the model computed, with gradients.
            batch: The micro-batch, on the same device.
        """


class NamedLossFunction(Protocol):
    """A policy loss: a function that ``algorithm.loss`` names."""

    def __call__(self, outputs: TokenOutputs, batch: RaggedBatch, algorithm: AlgorithmSection, /) -> LossOutputs:
        """Compute one micro-batch's part of the loss, as :class:`LossFunction` does.

        Args:
            outputs: What the policy computed, with gradients.
            batch: The micro-batch, on the same device, with ``advantages``, ``loss_weights`` and ``token_shares``.
            algorithm: Settings.
        """


def required(value: Tensor | None, name: str, loss: object) -> Tensor:
    """Give a field that a loss needs, or raise a DataError that names it."""
    if value is None:
        where = type(loss).__name__
        raise DataError("The loss lacks a field that it needs.", where=where, why=f"{name} is None")
    return value
