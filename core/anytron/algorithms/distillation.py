"""Learn from a teacher on the policy's own responses: on-policy distillation.

With ``x`` drawn from the policy ``p``, ``log p(x) - log q(x)`` estimates the reverse KL divergence KL(p || q) to the
teacher ``q`` (k1 of :mod:`anytron.algorithms.kl`). Its negative, as the advantage of the token, has the policy gradient
that takes a step down that divergence at each state that the policy comes to (Agarwal et al., GKD, arXiv:2306.13649,
section 3.1, with reverse KL and the student's data alone; Lu et al., https://thinkingmachines.ai/blog/on-policy-distillation).
A token answers for itself and not for what follows it: there is no discounted sum over later tokens, which MiniLLM
(Gu et al., arXiv:2306.08543, section 2.2) adds and which makes the estimate noisy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from anytron.algorithms.contract import LOG_RATIO_LIMIT, required

if TYPE_CHECKING:
    from torch import Tensor

    from anytron.config.algorithm import AlgorithmSection
    from anytron.sequences.batch import RaggedBatch


def with_distillation(batch: RaggedBatch, algorithm: AlgorithmSection) -> RaggedBatch:
    """Add the teacher's part to each token's advantage: ``distillation_coefficient * log(q / p_old)``.

    Args:
        batch: With ``advantages``, and with the log-probs of the old policy and of the teacher if that is asked for.
        algorithm: Settings.

    Raises:
        DataError: A field that is needed is missing.
    """
    if algorithm.distillation_coefficient == 0.0:
        return batch
    advantages = required(batch.advantages, "advantages", "algorithm.distillation_coefficient")
    taught = -algorithm.distillation_coefficient * reverse_kl(batch).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return replace(batch, advantages=advantages + taught)


def reverse_kl(batch: RaggedBatch) -> Tensor:
    """Estimate the divergence of the policy before the step's updates to the teacher, by token: ``log(p_old / q)``.

    Both are those at the temperature of the rollout.

    Args:
        batch: With ``old_log_probs`` and ``teacher_log_probs``.

    Returns:
        float32 ``[T]`` in nats, of either sign; 0 outside of responses.
    """
    old = required(batch.old_log_probs, "old_log_probs", "teacher")
    teacher = required(batch.teacher_log_probs, "teacher_log_probs", "teacher")
    return torch.where(batch.response_mask, old - teacher, 0.0)


def teacher_metrics(batch: RaggedBatch | None) -> dict[str, float]:
    """Compute how far the step's policy is from its teacher; nothing without one, or for a step that is skipped."""
    if batch is None or batch.teacher_log_probs is None:
        return {}
    return {"policy/teacher_kl": reverse_kl(batch)[batch.response_mask].mean().item()}
