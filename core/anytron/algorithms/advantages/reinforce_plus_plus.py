"""REINFORCE++ (arXiv:2501.03262): returns that are given a common scale over the whole step, without a critic."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from anytron.algorithms.advantages.gae import gae
from anytron.algorithms.advantages.groups import broadcast_to_tokens, compare, grpo, whiten
from anytron.algorithms.contract import Advantages, required

if TYPE_CHECKING:
    from torch import Tensor

    from anytron.config.algorithm import AlgorithmSection
    from anytron.sequences.batch import RaggedBatch


def return_advantages(batch: RaggedBatch, rewards: Tensor, algorithm: AlgorithmSection) -> Advantages:
    """Give every token what follows it, whitened over the step (``algorithm.advantage=reinforce_plus_plus``).

    The return is ``R_t = r_t + gamma * R_{t+1}`` over the response's own tokens (arXiv:2501.03262, section 3.1). It is
    what generalized advantage estimation gives without values and with a lambda of 1.
    """
    del rewards
    token_rewards = required(batch.token_rewards, "token_rewards", "reinforce_plus_plus")
    nothing = torch.zeros_like(token_rewards)
    mask = batch.response_mask
    returns = gae(token_rewards, nothing, batch.lengths, mask, gamma=algorithm.gamma, gae_lambda=1.0)
    return Advantages(whiten(returns, mask))


def returns_against_group(batch: RaggedBatch, rewards: Tensor, algorithm: AlgorithmSection) -> Advantages:
    """Whiten differences from the group's mean over the step (``algorithm.advantage=reinforce_plus_plus_baseline``).

    The group's mean is the baseline and the step's deviation the scale: a group whose rewards hardly vary is not blown
    up, as its own deviation would do (arXiv:2501.03262, section 3.2).
    """
    del algorithm
    groups = required(batch.groups, "groups", "reinforce_plus_plus_baseline")
    per_sequence = compare(rewards, groups, partial(grpo, normalize_std=False))
    per_token = broadcast_to_tokens(per_sequence, batch.lengths, batch.response_mask)
    return Advantages(whiten(per_token, batch.response_mask))
