"""Soft adaptive policy optimization (arXiv:2511.20347): a smooth gate instead of a clip."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.algorithms.contract import TokenLosses

if TYPE_CHECKING:
    from anytron.algorithms.contract import PolicyTokens
    from anytron.config.schema import AlgorithmSection


def sapo(tokens: PolicyTokens, algorithm: AlgorithmSection) -> TokenLosses:
    """Let a token's gradient fade as its ratio leaves 1. ``algorithm.loss=sapo``.

    Per token, with ``tau`` one of two temperatures, as the advantage is positive or not (eq. 5 and 6)::

        -(4 / tau) * sigmoid(tau * (ratio - 1)) * A

    At a ratio of 1 the gradient is the policy gradient. A larger temperature fades faster; the paper lets tokens of
    negative advantages fade a little faster than the others.
    """
    ratio = tokens.log_ratio().exp()
    positive, negative = algorithm.sapo_tau_positive, algorithm.sapo_tau_negative
    tau = negative + (positive - negative) * (tokens.advantages > 0).to(ratio.dtype)
    gate = torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
    return TokenLosses(-gate * tokens.advantages)
