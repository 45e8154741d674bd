"""Estimate KL divergences from the log-probs of sampled tokens: a penalty to a reference, and learning from a teacher.

With ``x`` drawn from the policy ``p`` and ``r = q(x) / p(x)`` for the reference ``q``, the three
estimators of KL(p || q) come from J. Schulman, "Approximating KL Divergence",
http://joschu.net/blog/kl-approx.html:

====  ===================  =============================================================
k1    ``-log r``           unbiased, large variance, can be negative
k2    ``(log r)^2 / 2``    biased, small variance; its *gradient* is the one of KL(p || q)
k3    ``r - 1 - log r``    unbiased, never negative; what GRPO uses (arXiv:2402.03300, eq. 4)
====  ===================  =============================================================

As a loss, k1 has a gradient that is zero in expectation: it measures the divergence but does not limit
it. As a part of the reward, k1 is the estimator whose policy gradient is the gradient of KL(p || q): it is subtracted
from the rewards of tokens.

On-policy distillation learns from a teacher ``q`` on the policy's own responses. The advantage of a token is the
negative of k1: its policy gradient reduces KL(p || q) at each state that the policy visits (Agarwal
et al., GKD, arXiv:2306.13649, section 3.1, with reverse KL and the student's data alone; Lu et al.,
https://thinkingmachines.ai/blog/on-policy-distillation). The advantage of a token does not include what follows it.
MiniLLM (Gu et al., arXiv:2306.08543, section 2.2) adds a discounted sum over later tokens, which makes the estimate
noisy.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anytron.algorithms.advantages import place_at_end
from anytron.algorithms.contract import LOG_RATIO_LIMIT, required

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from anytron.config.algorithm import AlgorithmSection
    from anytron.sequences.batch import RaggedBatch


K3_LIMIT = 10.0
"""k3 is held below this, as in verl (``trainer/ppo/core_algos.py``): one token could outweigh all others in a step."""
LARGEST_ERROR = 0.2
"""The adaptive coefficient reacts to no larger relative error (arXiv:1909.08593, section 2.2)."""

ADAPTS = ("kl/coefficient", "policy/kl")
"""Metrics of a step from which the next step's adaptive coefficient is computed."""


def k1(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Estimate per-token KL as ``log p - log q``. All ``[T]`` float32, in nats."""
    return log_probs - reference


def k2(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Estimate per-token KL as ``(log p - log q)^2 / 2``. All ``[T]`` float32, in nats."""
    return 0.5 * (log_probs - reference).square()


def k3(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Estimate per-token KL as ``q/p - 1 - log q/p``. All ``[T]`` float32, in nats.

    ``expm1`` keeps its precision where both models nearly agree, which is the usual case. Beyond
    :data:`K3_LIMIT` there is no gradient.
    """
    log_ratio = (reference - log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.expm1(log_ratio) - log_ratio).clamp(max=K3_LIMIT)


KL_ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType({"k1": k1, "k2": k2, "k3": k3})
"""KL estimators by their name in ``algorithm.kl_estimator``."""


def penalizes_rewards(algorithm: AlgorithmSection) -> bool:
    """Return whether the KL penalty is a part of the reward, and not of the loss."""
    return algorithm.kl_coefficient > 0.0 and algorithm.kl_placement == "reward"


def to_remember(algorithm: AlgorithmSection, metrics: Mapping[str, float]) -> dict[str, float]:
    """Select the metrics of a step that :func:`adapted` needs, for a checkpoint; none without ``kl_target``."""
    wanted = () if algorithm.kl_target is None else ADAPTS
    return {name: metrics[name] for name in wanted if math.isfinite(metrics.get(name, math.nan))}


def adapted(algorithm: AlgorithmSection, metrics: Mapping[str, float], samples: int) -> AlgorithmSection:
    """Return the algorithm settings of a step, with its KL coefficient.

    Without ``kl_target`` the coefficient is the configured one. With ``kl_target``, it follows the divergence of the
    previous step (arXiv:1909.08593, section 2.2; with the horizon as in TRL's and verl's code)::

        error = clip(KL / kl_target - 1, -0.2, 0.2)
        coefficient = coefficient * (1 + error * min(samples / kl_horizon, 1))

    Args:
        algorithm: Section ``algorithm`` of the configuration.
        metrics: Metrics of the previous step, with ``kl/coefficient`` and ``policy/kl``; empty in the first step.
        samples: Samples of a step.
    """
    if algorithm.kl_target is None or "kl/coefficient" not in metrics:
        return algorithm
    coefficient, divergence = metrics["kl/coefficient"], metrics.get("policy/kl", math.nan)
    if math.isfinite(divergence):  # otherwise no update was done
        error = min(max(divergence / algorithm.kl_target - 1.0, -LARGEST_ERROR), LARGEST_ERROR)
        coefficient *= 1.0 + error * min(samples / algorithm.kl_horizon, 1.0)
    return algorithm.model_copy(update={"kl_coefficient": coefficient})


def rewards_of_responses(rewards: Tensor, batch: RaggedBatch, algorithm: AlgorithmSection) -> Tensor:
    """Return each sequence's reward: its response's, minus its tokens' KL penalties if they are part of the reward.

    If a response has several sequences, the penalties of all of them are subtracted from the reward of each.

    Args:
        rewards: float32 ``[B]``, the reward of each sequence's response without penalties.
        batch: The samples; if rewards are penalised, with ``old_log_probs`` and ``reference_log_probs``.
        algorithm: Section ``algorithm`` of the configuration.

    Returns:
        float32 ``[B]``.

    Raises:
        DataError: Rewards are penalised, and the batch has no ``old_log_probs`` or no ``reference_log_probs``.
    """
    if not penalizes_rewards(algorithm):
        return rewards
    penalties = algorithm.kl_coefficient * kl_of_rewards(batch, algorithm)
    of_sequences = torch.arange(batch.num_sequences)
    if batch.responses is not None:
        of_sequences = torch.unique_consecutive(batch.responses, return_inverse=True)[1]
    response = torch.repeat_interleave(of_sequences, batch.lengths)
    return rewards - torch.zeros_like(rewards).index_add_(0, response, penalties)[of_sequences]


def rewards_of_tokens(rewards: Tensor, batch: RaggedBatch, algorithm: AlgorithmSection) -> Tensor:
    """Return the reward of each token; arguments as for :func:`rewards_of_responses`.

    The last token of each sequence's response gets the response's reward, and all other tokens get 0. If penalties are
    part of the reward, ``kl_coefficient * KL_t`` is subtracted from each token's reward (arXiv:1909.08593, eq. 2;
    arXiv:2203.02155, section 3.5).

    Returns:
        float32 ``[T]``, 0 outside of responses.

    Raises:
        DataError: Rewards are penalised, and the batch has no ``old_log_probs`` or no ``reference_log_probs``.
    """
    per_token = place_at_end(rewards, batch.lengths, batch.response_mask)
    if penalizes_rewards(algorithm):
        per_token -= algorithm.kl_coefficient * kl_of_rewards(batch, algorithm)
    return per_token


def kl_of_rewards(batch: RaggedBatch, algorithm: AlgorithmSection) -> Tensor:
    """Estimate, for each token, how far the policy is from the reference: a KL divergence, in nats.

    The policy is the one before the step's updates.

    Args:
        batch: Batch with ``old_log_probs`` and ``reference_log_probs``.
        algorithm: Section ``algorithm`` of the configuration, which names the estimator.

    Returns:
        float32 ``[T]``, 0 outside of responses.

    Raises:
        DataError: The batch has no ``old_log_probs`` or no ``reference_log_probs``.
    """
    old = required(batch.old_log_probs, "old_log_probs", "algorithm.kl_placement: reward")
    reference = required(batch.reference_log_probs, "reference_log_probs", "algorithm.kl_placement: reward")
    mask = batch.response_mask
    return KL_ESTIMATORS[algorithm.kl_estimator](torch.where(mask, old, 0.0), torch.where(mask, reference, 0.0))


def kl_metrics(batch: RaggedBatch | None, algorithm: AlgorithmSection) -> dict[str, float]:
    """Compute the metrics of a step's KL penalty that no loss computes.

    Args:
        batch: The step's samples; None if the step was skipped.
        algorithm: Section ``algorithm`` of the configuration.

    Returns:
        ``kl/coefficient`` if ``kl_target`` is set. ``policy/kl``, the mean over response tokens, if there is a batch
        and the penalty is part of the reward.

    Raises:
        DataError: Rewards are penalised, and the batch has no ``old_log_probs`` or no ``reference_log_probs``.
    """
    metrics = {} if algorithm.kl_target is None else {"kl/coefficient": algorithm.kl_coefficient}
    if batch is not None and penalizes_rewards(algorithm):
        metrics["policy/kl"] = kl_of_rewards(batch, algorithm)[batch.response_mask].mean().item()
    return metrics


def with_distillation(batch: RaggedBatch, algorithm: AlgorithmSection) -> RaggedBatch:
    """Add ``distillation_coefficient * log(q / p_old)`` to each token's advantage, with the teacher ``q``.

    Args:
        batch: Batch with ``advantages``, and, if there is a teacher, the log-probs of the old policy and of the
            teacher.
        algorithm: Section ``algorithm`` of the configuration.

    Raises:
        DataError: One of these fields is missing.
    """
    if algorithm.distillation_coefficient == 0.0:
        return batch
    advantages = required(batch.advantages, "advantages", "algorithm.distillation_coefficient")
    taught = -algorithm.distillation_coefficient * reverse_kl(batch).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return replace(batch, advantages=advantages + taught)


def reverse_kl(batch: RaggedBatch) -> Tensor:
    """Estimate, for each token, how far the policy is from the teacher: ``log(p_old / q)``.

    ``p_old`` is the policy before the step's updates, ``q`` the teacher. Both log-probs are at the temperature of the
    rollout.

    Args:
        batch: Batch with ``old_log_probs`` and ``teacher_log_probs``.

    Returns:
        float32 ``[T]`` in nats, of either sign; 0 outside of responses.

    Raises:
        DataError: The batch has no ``old_log_probs`` or no ``teacher_log_probs``.
    """
    old = required(batch.old_log_probs, "old_log_probs", "teacher")
    teacher = required(batch.teacher_log_probs, "teacher_log_probs", "teacher")
    return torch.where(batch.response_mask, old - teacher, 0.0)


def teacher_metrics(batch: RaggedBatch | None) -> dict[str, float]:
    """Compute how far the step's policy is from its teacher; empty without a teacher, or if the step is skipped.

    Raises:
        DataError: The batch has ``teacher_log_probs``, but no ``old_log_probs``.
    """
    if batch is None or batch.teacher_log_probs is None:
        return {}
    return {"policy/teacher_kl": reverse_kl(batch)[batch.response_mask].mean().item()}
