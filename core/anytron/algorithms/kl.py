"""Estimate the KL divergence to a reference model from the log-probs of sampled tokens, and weigh it.

With ``x`` drawn from the policy ``p`` and ``r = q(x) / p(x)`` for the reference ``q``, the three
estimators of KL(p || q) are those of J. Schulman, "Approximating KL Divergence",
http://joschu.net/blog/kl-approx.html:

====  ===================  =============================================================
k1    ``-log r``           unbiased, large variance, can be negative
k2    ``(log r)^2 / 2``    biased, small variance; its *gradient* is the one of KL(p || q)
k3    ``r - 1 - log r``    unbiased, never negative; what GRPO uses (arXiv:2402.03300, eq. 4)
====  ===================  =============================================================

As a loss, k1 has a gradient that is zero in expectation: it shows the divergence and does not hold
it back. As a part of the reward it is the one whose policy gradient is that of KL(p || q).
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anytron.algorithms.contract import LOG_RATIO_LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from anytron.config.algorithm import AlgorithmSection

K3_LIMIT = 10.0
"""k3 is held below this, as in verl (``trainer/ppo/core_algos.py``): one token could be all of a step's loss."""
LARGEST_ERROR = 0.2
"""The adaptive coefficient reacts to no larger relative error (arXiv:1909.08593, section 2.2)."""

ADAPTS = ("kl/coefficient", "policy/kl")
"""Metrics of a step from which an adaptive coefficient goes on."""


def k1(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Estimate per-token KL as ``log p - log q``. All ``[T]`` float32, in nats."""
    return log_probs - reference


def k2(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Estimate per-token KL as ``(log p - log q)^2 / 2``. All ``[T]`` float32, in nats."""
    return 0.5 * (log_probs - reference).square()


def k3(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Estimate per-token KL as ``q/p - 1 - log q/p``. All ``[T]`` float32, in nats.

    ``expm1`` keeps its precision where both models agree, which is where training spends its time. Beyond
    :data:`K3_LIMIT` there is no gradient.
    """
    log_ratio = (reference - log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.expm1(log_ratio) - log_ratio).clamp(max=K3_LIMIT)


KL_ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType({"k1": k1, "k2": k2, "k3": k3})
"""By their name in ``algorithm.kl_estimator``."""


def penalizes_rewards(algorithm: AlgorithmSection) -> bool:
    """Say whether the KL penalty is a part of the reward, and not of the loss."""
    return algorithm.kl_coefficient > 0.0 and algorithm.kl_placement == "reward"


def to_remember(algorithm: AlgorithmSection, metrics: Mapping[str, float]) -> dict[str, float]:
    """Choose what :func:`adapted` will want of a step's metrics, for a checkpoint; nothing without ``kl_target``."""
    wanted = () if algorithm.kl_target is None else ADAPTS
    return {name: metrics[name] for name in wanted if math.isfinite(metrics.get(name, math.nan))}


def adapted(algorithm: AlgorithmSection, metrics: Mapping[str, float], samples: int) -> AlgorithmSection:
    """Give the settings of a step, with its KL coefficient.

    Without ``kl_target`` that is always the configuration's. With one it follows the divergence of the step before
    (arXiv:1909.08593, section 2.2; with the horizon as in TRL's and verl's code)::

        error = clip(KL / kl_target - 1, -0.2, 0.2)
        coefficient = coefficient * (1 + error * samples / kl_horizon)

    Args:
        algorithm: The configuration's.
        metrics: Those of the step before, ``kl/coefficient`` and ``policy/kl`` among them; empty in the first step.
        samples: Samples of a step.
    """
    if algorithm.kl_target is None or "kl/coefficient" not in metrics:
        return algorithm
    coefficient, divergence = metrics["kl/coefficient"], metrics.get("policy/kl", math.nan)
    if math.isfinite(divergence):  # otherwise no update was done
        error = min(max(divergence / algorithm.kl_target - 1.0, -LARGEST_ERROR), LARGEST_ERROR)
        coefficient *= 1.0 + error * min(samples / algorithm.kl_horizon, 1.0)
    return algorithm.model_copy(update={"kl_coefficient": coefficient})
