"""Spread a step's rewards over tokens, less the KL penalty if that is part of the reward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anytron.algorithms.advantages.per_token import place_at_end
from anytron.algorithms.contract import required
from anytron.algorithms.kl import KL_ESTIMATORS, penalizes_rewards

if TYPE_CHECKING:
    from anytron.config.algorithm import AlgorithmSection
    from anytron.sequences.batch import RaggedBatch


def rewards_and_token_rewards(
    rewards: Tensor, batch: RaggedBatch, algorithm: AlgorithmSection
) -> tuple[Tensor, Tensor]:
    """Say what each response and each of its tokens is rewarded with.

    A token's reward is ``-kl_coefficient * KL_t``, and the response's own is added to the last one (arXiv:1909.08593,
    eq. 2; arXiv:2203.02155, section 3.5). Both results tell of the same rewards: a response's is the sum of its
    tokens', if it has any.

    Args:
        rewards: float32 ``[B]``.
        batch: The samples; with ``old_log_probs`` and ``reference_log_probs`` if rewards are penalised.
        algorithm: Settings.

    Returns:
        float32 ``[B]`` and ``[T]``, the latter 0 outside of responses.
    """
    per_token = place_at_end(rewards, batch.lengths, batch.response_mask)
    if not penalizes_rewards(algorithm):
        return rewards, per_token
    penalties = algorithm.kl_coefficient * kl_of_rewards(batch, algorithm)
    sequence = torch.repeat_interleave(torch.arange(batch.num_sequences), batch.lengths)
    return rewards - torch.zeros_like(rewards).index_add_(0, sequence, penalties), per_token - penalties


def kl_of_rewards(batch: RaggedBatch, algorithm: AlgorithmSection) -> Tensor:
    """Estimate the KL divergence of the policy before the step's updates to the reference, by token.

    Args:
        batch: With ``old_log_probs`` and ``reference_log_probs``.
        algorithm: Names the estimator.

    Returns:
        float32 ``[T]``, 0 outside of responses.
    """
    old = required(batch.old_log_probs, "old_log_probs", "algorithm.kl_placement: reward")
    reference = required(batch.reference_log_probs, "reference_log_probs", "algorithm.kl_placement: reward")
    mask = batch.response_mask
    return KL_ESTIMATORS[algorithm.kl_estimator](torch.where(mask, old, 0.0), torch.where(mask, reference, 0.0))


def kl_metrics(batch: RaggedBatch | None, algorithm: AlgorithmSection) -> dict[str, float]:
    """Compute the metrics of a penalty of a step that no loss knows of: its coefficient, and the KL of the rewards.

    Of a step that is skipped, which has no batch, the coefficient alone.
    """
    metrics = {} if algorithm.kl_target is None else {"kl/coefficient": algorithm.kl_coefficient}
    if batch is not None and penalizes_rewards(algorithm):
        metrics["policy/kl"] = kl_of_rewards(batch, algorithm)[batch.response_mask].mean().item()
    return metrics
