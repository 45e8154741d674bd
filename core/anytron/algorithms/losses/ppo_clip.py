"""The clipped loss of PPO, which GRPO uses too, with two bounds, and a third for bad tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.algorithms.contract import TokenLosses

if TYPE_CHECKING:
    from torch import Tensor

    from anytron.algorithms.contract import PolicyTokens
    from anytron.config.schema import AlgorithmSection


def ppo_clip(tokens: PolicyTokens, algorithm: AlgorithmSection) -> TokenLosses:
    """Stop the gradient of tokens whose probability has moved enough. ``algorithm.loss=ppo_clip``.

    Per token, with ``ratio = p / p_old`` and advantage ``A``::

        -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

    (PPO, arXiv:1707.06347, eq. 7; two bounds as in DAPO, arXiv:2503.14476, eq. 10.) With ``dual_clip = c``, where
    ``A < 0`` no token costs more than ``-c * A`` (arXiv:1912.09729, eq. 5): otherwise a bad token that has become
    likely would outweigh all others. In a batch's only update the ratio is 1 and its gradient the policy gradient.
    """
    return clipped(tokens.log_ratio().exp(), tokens.advantages, algorithm)


def clipped(ratio: Tensor, advantages: Tensor, algorithm: AlgorithmSection) -> TokenLosses:
    """Compute the clipped loss of given ratios, ``[T]``, and say which tokens have no gradient because of it."""
    low, high = 1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high
    losses = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    limited = torch.where(advantages > 0, ratio > high, ratio < low) & (advantages != 0)
    if algorithm.dual_clip is not None:
        most = -algorithm.dual_clip * advantages
        limited = limited | ((advantages < 0) & (losses > most))
        losses = torch.where(advantages < 0, torch.minimum(losses, most), losses)
    return TokenLosses(losses, {"policy/clip_fraction": limited})
