"""Correct for tokens that were drawn from another distribution than training's, and measure how far the two differ.

The rollout engine draws with older weights, or computes the same weights with other rounding and other
kernels. Let ``w = p_old / p_rollout`` for a token, and for a response the product of its tokens' ratios. Then the mean
of ``w`` times the loss over the drawn samples estimates the mean of the loss under training's own policy. Large weights
make the estimate noisy: ``truncated`` limits them to a cap (Ionides, https://doi.org/10.1198/106186008X320456; for such
engines Yao et al., https://fengyao.notion.site/off-policy-rl), ``masked`` drops tokens whose weight is above the cap or
below a floor (IcePop, arXiv:2510.18855, section 3.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anytron.algorithms.contract import LOG_RATIO_LIMIT, PolicyTokens, required

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anytron.config.algorithm import AlgorithmSection

MOMENTS = "moments/"
"""Prefix of the sums from which :func:`with_moments_resolved` computes the metrics that are not sums themselves."""


@dataclass(frozen=True)
class Correction:
    """Correction of a micro-batch's tokens.

    Attributes:
        factor: float32 ``[T]``, factor of each token's loss, without gradient.
        metrics: This micro-batch's parts of the mini-batch's metrics.
    """

    factor: Tensor
    metrics: dict[str, Tensor]


def correct(tokens: PolicyTokens, shares: Tensor, algorithm: AlgorithmSection) -> Correction:
    """Compute the factor of each token from the ratio of its probability in training to that in the rollout.

    With ``importance_correction=measured`` all factors are 1, and only the metrics are computed.

    Args:
        tokens: Tokens with ``rollout_log_probs``.
        shares: float32 ``[T]``, each token's weight in metrics (``RaggedBatch.token_shares``).
        algorithm: Section ``algorithm`` of the configuration, with ``importance_correction``, ``importance_level``,
            ``importance_cap`` and ``importance_floor``.

    Raises:
        DataError: The tokens have no ``rollout_log_probs``.
    """
    drawn = required(tokens.rollout_log_probs, "rollout_log_probs", "algorithm.importance_correction")
    difference = tokens.old_log_probs.detach() - drawn
    log_weight = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    of_token = log_weight.exp()
    of_sequence = tokens.sequence_sum(difference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    weight = of_token if algorithm.importance_level == "token" else tokens.to_tokens(of_sequence)
    cap, floor = algorithm.importance_cap, algorithm.importance_floor
    beyond = weight > cap
    factor = torch.ones_like(weight)
    if algorithm.importance_correction == "truncated":
        factor = weight.clamp(max=cap)
    elif algorithm.importance_correction == "masked":
        beyond = beyond | (weight < floor)
        factor = torch.where(beyond, 0.0, weight)

    counted = shares > 0
    present = tokens.sequence_sum(counted.to(weight.dtype)) > 0
    sequences = torch.where(present, of_sequence, 0.0)
    x = tokens.old_log_probs.detach()
    metrics = {
        "rollout/kl": torch.sum(shares * (of_token - 1.0 - log_weight)),
        "rollout/log_prob_abs_diff_max": torch.where(counted, difference.abs(), 0.0).amax(),
        "rollout/importance_mean": torch.sum(shares * weight),
        "rollout/importance_max": torch.where(counted, weight, 0.0).amax(),
        "rollout/importance_clip_fraction": torch.sum(shares * beyond),
        "rollout/sequence_importance_max": sequences.amax(),
    }
    moments = {
        "x": torch.sum(shares * x),
        "xx": torch.sum(shares * x * x),
        "d": torch.sum(shares * difference),
        "dd": torch.sum(shares * difference * difference),
        "xd": torch.sum(shares * x * difference),
        "w": torch.sum(shares * weight),
        "ww": torch.sum(shares * weight * weight),
        "sequences": present.sum().to(weight.dtype),
        "s": sequences.sum(),
    }
    return Correction(factor, metrics | {f"{MOMENTS}{name}": value for name, value in moments.items()})


def with_moments_resolved(metrics: Mapping[str, float]) -> dict[str, float]:
    """Replace sums over a whole mini-batch by the metrics computed from them; other metrics stay.

    ``rollout/log_prob_correlation`` is Pearson's correlation of training's log-probs ``x`` with the rollout's,
    ``x - d``. It is computed from the small differences ``d``: computed in float32 from the moments of the log-probs
    themselves, it could not be distinguished from 1. It is 1 if nothing varies. ``rollout/effective_sample_size`` is
    Kish's, ``(sum w)^2 / (n * sum w^2)``.
    """
    moments = {name.removeprefix(MOMENTS): value for name, value in metrics.items() if name.startswith(MOMENTS)}
    others = {name: value for name, value in metrics.items() if not name.startswith(MOMENTS)}
    if not moments:
        return others
    spread = moments["xx"] - moments["x"] ** 2
    common = spread - (moments["xd"] - moments["x"] * moments["d"])
    other = 2.0 * common - spread + (moments["dd"] - moments["d"] ** 2)
    product = spread * other
    return others | {
        "rollout/log_prob_correlation": common / math.sqrt(product) if product > 0.0 else 1.0,
        "rollout/effective_sample_size": moments["w"] ** 2 / moments["ww"],
        "rollout/sequence_importance_mean": moments["s"] / max(moments["sequences"], 1.0),
    }
