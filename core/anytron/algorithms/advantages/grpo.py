"""Compare the responses to one prompt with each other: GRPO and Dr. GRPO."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anytron.algorithms.advantages.groups import compare, differ
from anytron.algorithms.advantages.per_token import broadcast_to_tokens
from anytron.algorithms.contract import Advantages, required

if TYPE_CHECKING:
    from anytron.config.algorithm import AlgorithmSection
    from anytron.sequences.batch import RaggedBatch

STD_EPSILON = 1e-4
"""Added to a group's standard deviation; TRL's value (trl/trainer/grpo_trainer.py)."""


def grpo(rewards: Tensor, normalize_std: bool) -> Tensor:
    """Compare each response with its group (GRPO, arXiv:2402.03300, section 4.1.2).

    The advantage is the reward minus the group's mean, divided by the group's standard deviation
    (unbiased, as TRL and verl take it). A group whose rewards are all equal, so also a group of
    one, has exactly zero advantages, never NaN.

    Args:
        rewards: ``[P, G]``; NaN where a group has no further response.
        normalize_std: Divide by the standard deviation; off is the advantage of Dr. GRPO (arXiv:2503.20783, section
            3.2), which does not favour prompts whose rewards hardly vary.

    Returns:
        ``[P, G]``, same dtype; 0 where the reward is NaN.
    """
    compared = ~rewards.isnan()
    count = compared.sum(dim=1, keepdim=True)
    centred = rewards - rewards.nansum(dim=1, keepdim=True) / count.clamp(min=1)
    # The mean of equal numbers can differ from them in the last bit.
    centred = torch.where(compared & differ(rewards)[:, None], centred, torch.zeros_like(centred))
    if not normalize_std:
        return centred
    deviation = (centred.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    return centred / (deviation + STD_EPSILON)


def group_advantages(batch: RaggedBatch, rewards: Tensor, algorithm: AlgorithmSection) -> Advantages:
    """Give every response token the advantage of its response in its group (``algorithm.advantage=grpo``)."""
    groups = required(batch.groups, "groups", "grpo")
    per_sequence = compare(rewards, groups, partial(grpo, normalize_std=algorithm.normalize_std))
    return Advantages(broadcast_to_tokens(per_sequence, batch.lengths, batch.response_mask))


def centred_group_advantages(batch: RaggedBatch, rewards: Tensor, algorithm: AlgorithmSection) -> Advantages:
    """Do the same without the standard deviation (``algorithm.advantage=dr_grpo``)."""
    del algorithm
    groups = required(batch.groups, "groups", "dr_grpo")
    per_sequence = compare(rewards, groups, partial(grpo, normalize_std=False))
    return Advantages(broadcast_to_tokens(per_sequence, batch.lengths, batch.response_mask))
