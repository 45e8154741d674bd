"""Types of the arguments and results of advantage estimators and losses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from anytron.base.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anytron.config.algorithm import AlgorithmSection
    from anytron.sequences.batch import RaggedBatch, TokenOutputs

LOG_RATIO_LIMIT = 20.0
"""Logarithms of ratios are held within this, as in verl (``trainer/ppo/core_algos.py``): float32's exp overflows at
88.7, and 0 times infinity is NaN, also where an advantage is 0."""


@dataclass(frozen=True)
class Advantages:
    """The advantages that an estimator computes from a step's rewards.

    Attributes:
        per_token: float32 ``[T]``, 0 outside of responses.
        returns: float32 ``[T]``, the targets of the critic's values; None without a critic.
    """

    per_token: Tensor
    returns: Tensor | None = None


class AdvantageFunction(Protocol):
    """An advantage estimator: a function that ``algorithm.advantage`` names."""

    def __call__(self, batch: RaggedBatch, rewards: Tensor, algorithm: AlgorithmSection, /) -> Advantages:
        """Estimate the advantages of a step's samples.

        Args:
            batch: B sequences, with ``groups`` and ``token_rewards``, and with ``values`` if there is a critic. Prompts
                have different numbers of samples if some samples are not learnt from (``rewards[].on_error``,
                ``algorithm.overlong_masking``); a prompt may have only one.
            rewards: float32 ``[B]``, finite. With ``algorithm.kl_placement=reward``, the response's KL penalties are
                subtracted.
            algorithm: Section ``algorithm`` of the configuration.
        """


@dataclass(frozen=True)
class PolicyTokens:
    """One micro-batch, as a policy loss receives it: ``B`` whole sequences, concatenated, ``T`` tokens in all.

    Everything per token is 0 outside of responses. A sequence is never split, neither over micro-batches nor over
    ranks: engines gather the outputs of context-parallel ranks, so that a function of a whole sequence has the right
    value and the right gradient.

    Attributes:
        log_probs: float32 ``[T]``, log-probs of the policy, with gradient.
        old_log_probs: float32 ``[T]``, log-probs before the step's updates; if a batch is used for one update only, the
            current log-probs.
        advantages: float32 ``[T]``.
        response_mask: bool ``[T]``, True = the policy wrote the token, and it counts.
        sequence: int64 ``[T]``, the number of each token's sequence, from 0 to B - 1.
        num_sequences: B, the number of sequences.
        entropy: float32 ``[T]``, entropy of the distribution from which the token was drawn, with gradient.
        rollout_log_probs: float32 ``[T]``, log-probs that the rollout computed; None if it computed none.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    response_mask: Tensor
    sequence: Tensor
    num_sequences: int
    entropy: Tensor
    rollout_log_probs: Tensor | None = None

    def log_ratio(self) -> Tensor:
        """``log(p / p_old)`` of each token, within :data:`LOG_RATIO_LIMIT`: float32 ``[T]``, with gradient."""
        return (self.log_probs - self.old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Add up the values of each response's tokens: ``[T]`` -> ``[B]``."""
        kept = torch.where(self.response_mask, values, 0.0)
        return kept.new_zeros(self.num_sequences).index_add(0, self.sequence, kept)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Average the values of each response's tokens, 0 for an empty one: ``[T]`` -> ``[B]``."""
        count = self.sequence_sum(torch.ones_like(values))
        return self.sequence_sum(values) / count.clamp(min=1.0)

    def to_tokens(self, per_sequence: Tensor) -> Tensor:
        """Return the sequence's value for every token of its response: ``[B]`` -> ``[T]``."""
        return torch.where(self.response_mask, per_sequence.index_select(0, self.sequence), 0.0)


@dataclass(frozen=True)
class TokenLosses:
    """Loss and metrics of each token, from a policy loss.

    Attributes:
        per_token: float32 ``[T]``, with gradient; only responses count. ``algorithm.aggregation`` decides how they
            are combined into one loss.
        metrics: ``[T]`` by name. Each is averaged over the response tokens of the mini-batch; of a metric whose name
            ends in ``_max``, the maximum is taken instead. Metrics of a user's loss are written below
            ``loss/metrics/``.
    """

    per_token: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class PolicyLossFunction(Protocol):
    """A policy's loss: a pure function that ``algorithm.loss`` names."""

    def __call__(self, tokens: PolicyTokens, algorithm: AlgorithmSection, /) -> TokenLosses:
        """Compute the loss of each token, without KL penalty and entropy bonus, which are added to every loss.

        Args:
            tokens: A micro-batch, on the device.
            algorithm: Section ``algorithm`` of the configuration; its ``options`` are the user's own.
        """


@dataclass(frozen=True)
class LossOutputs:
    """One micro-batch's part of the loss and of the metrics.

    Attributes:
        loss: Scalar, differentiable. The parts of all micro-batches and data-parallel ranks add up
            to the mini-batch's loss.
        metrics: Scalars without gradient, float32, on the loss's device. They add up in the same way, but of a metric
            whose name ends in ``_max`` the largest part is taken.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]


class LossFunction(Protocol):
    """Computes a loss. It is sent to the training ranks, so it must be picklable."""

    def __call__(self, outputs: TokenOutputs, batch: RaggedBatch) -> LossOutputs:
        """Compute one micro-batch's part of the loss.

        Args:
            outputs: What the model computed, with gradients.
            batch: The micro-batch, on the same device.
        """


def required(value: Tensor | None, name: str, where: str) -> Tensor:
    """Return a required field, or raise a DataError that names the field and the function that needs it."""
    if value is None:
        raise DataError(
            f"The field {name} is missing.",
            where=where,
            why=f"{where} needs {name}, which is None in the batch or in the model's outputs",
            fix=f"set {name} of the RaggedBatch or of the TokenOutputs before this function is called",
        )
    return value
