"""Compare each response with the mean of the others to its prompt: REINFORCE leave-one-out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.algorithms.advantages.groups import compare
from anytron.algorithms.advantages.grpo import grpo
from anytron.algorithms.advantages.per_token import broadcast_to_tokens
from anytron.algorithms.contract import Advantages, required

if TYPE_CHECKING:
    from torch import Tensor

    from anytron.config.algorithm import AlgorithmSection
    from anytron.sequences.batch import RaggedBatch


def rloo(rewards: Tensor) -> Tensor:
    """Subtract from each reward the mean of its group's others (RLOO, arXiv:2402.14740, section 3.3).

    With G responses this is ``G / (G - 1)`` times the difference from the mean of all. A group of one has no other
    and gets 0, and so do groups whose rewards are all equal, exactly.

    Args:
        rewards: ``[P, G]``; NaN where a group has no further response.

    Returns:
        ``[P, G]``, same dtype; 0 where the reward is NaN.
    """
    count = (~rewards.isnan()).sum(dim=1, keepdim=True).to(rewards.dtype)
    return grpo(rewards, normalize_std=False) * (count / (count - 1).clamp(min=1))


def leave_one_out_advantages(batch: RaggedBatch, rewards: Tensor, algorithm: AlgorithmSection) -> Advantages:
    """Give every response token its response's difference (``algorithm.advantage=rloo``)."""
    del algorithm
    per_sequence = compare(rewards, required(batch.groups, "groups", "rloo"), rloo)
    return Advantages(broadcast_to_tokens(per_sequence, batch.lengths, batch.response_mask))
