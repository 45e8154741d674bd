"""Clipped importance-sampling policy optimization (MiniMax-M1, arXiv:2506.13585): every token keeps its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.algorithms.contract import TokenLosses

if TYPE_CHECKING:
    from anytron.algorithms.contract import PolicyTokens
    from anytron.config.schema import AlgorithmSection


def cispo(tokens: PolicyTokens, algorithm: AlgorithmSection) -> TokenLosses:
    """Clip the weight of a token's gradient and not the gradient itself. ``algorithm.loss=cispo``.

    Per token, with ``sg`` stopping the gradient (eq. 4 and 5)::

        -sg(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * log p

    The paper has no lower bound: ``clip_low=1``.
    """
    low, high = 1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high
    ratio = tokens.log_ratio().detach().exp()
    capped = ((ratio > high) | (ratio < low)) & (tokens.advantages != 0)
    losses = -ratio.clamp(low, high) * tokens.advantages * tokens.log_probs
    return TokenLosses(losses, {"policy/capped_fraction": capped})
