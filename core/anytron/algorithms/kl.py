"""Estimate the KL divergence to a reference model from the log-probs of sampled tokens.

With ``x`` drawn from the policy ``p`` and ``r = q(x) / p(x)`` for the reference ``q``, the three
estimators of KL(p || q) are those of J. Schulman, "Approximating KL Divergence",
http://joschu.net/blog/kl-approx.html:

====  ===================  =============================================================
k1    ``-log r``           unbiased, large variance, can be negative
k2    ``(log r)^2 / 2``    biased, small variance; its *gradient* is the one of KL(p || q)
k3    ``r - 1 - log r``    unbiased, never negative; what GRPO uses (arXiv:2402.03300, eq. 4)
====  ===================  =============================================================

As a loss, k1 has a gradient that is zero in expectation: it shows the divergence and does not hold
it back.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def k1(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Estimate per-token KL as ``log p - log q``. All ``[T]`` float32, in nats."""
    return log_probs - reference


def k2(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Estimate per-token KL as ``(log p - log q)^2 / 2``. All ``[T]`` float32, in nats."""
    return 0.5 * (log_probs - reference).square()


def k3(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Estimate per-token KL as ``q/p - 1 - log q/p``. All ``[T]`` float32, in nats.

    ``expm1`` keeps its precision where both models agree, which is where training spends its time.
    """
    log_ratio = reference - log_probs
    return torch.expm1(log_ratio) - log_ratio


KL_ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType({"k1": k1, "k2": k2, "k3": k3})
"""By their name in ``algorithm.kl_estimator``."""
