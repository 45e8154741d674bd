"""The clipped policy loss of PPO and GRPO, from log-probs and entropies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from anytron.algorithms.contract import LossOutputs, required
from anytron.algorithms.kl import KL_ESTIMATORS

if TYPE_CHECKING:
    from anytron.batch import RaggedBatch, TokenOutputs
    from anytron.config.schema import AlgorithmSection


@dataclass(frozen=True)
class PolicyLoss:
    """The clipped policy-gradient loss with KL penalty and entropy bonus. Picklable.

    Per token, with ``ratio = p / p_old`` and advantage ``A``::

        -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)
            + kl_coefficient * KL(p || reference) - entropy_coefficient * entropy

    (PPO, arXiv:1707.06347, eq. 7; two clip bounds as in DAPO, arXiv:2503.14476, eq. 10; the KL
    estimators are in :mod:`anytron.algorithms.kl`.) Where the old log-probs are not given the batch
    is used once, and they are the current ones: the ratio is 1 and its gradient the policy gradient.

    With ``importance="truncated"`` the first term is multiplied by ``min(p_old / p_rollout, importance_cap)``, a
    constant: the tokens were drawn from the rollout engine's distribution, of older weights or of other rounding
    (truncated importance sampling: Ionides, https://doi.org/10.1198/106186008X320456; for such engines: Yao et al.,
    https://fengyao.notion.site/off-policy-rl). ``"measured"`` gives the metrics of that factor alone.

    Attributes:
        clip_low: The ratio is clipped below ``1 - clip_low``.
        clip_high: The ratio is clipped above ``1 + clip_high``.
        kl_coefficient: Weight of the KL penalty; 0 = none, and no reference log-probs are needed.
        kl_estimator: ``k1``, ``k2`` or ``k3``.
        entropy_coefficient: Weight of the entropy bonus.
        importance: ``none``, ``measured`` or ``truncated``.
        importance_cap: Largest factor of a token.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coefficient: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_coefficient: float = 0.0
    importance: Literal["none", "measured", "truncated"] = "none"
    importance_cap: float = 2.0

    @classmethod
    def from_config(cls, algorithm: AlgorithmSection) -> PolicyLoss:
        """Take the coefficients from the configuration."""
        return cls(
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            kl_coefficient=algorithm.kl_coefficient,
            kl_estimator=algorithm.kl_estimator,
            entropy_coefficient=algorithm.entropy_coefficient,
            importance="none" if algorithm.importance_correction == "auto" else algorithm.importance_correction,
            importance_cap=algorithm.importance_cap,
        )

    def __call__(self, outputs: TokenOutputs, batch: RaggedBatch) -> LossOutputs:
        """Compute one micro-batch's part of the loss.

        Args:
            outputs: With ``log_probs`` and ``entropy``.
            batch: The micro-batch on the same device, with ``advantages``, ``loss_weights`` and
                ``token_shares``.

        Raises:
            DataError: A field that the loss needs is missing.
        """
        log_probs = required(outputs.log_probs, "log_probs", self)
        entropy = required(outputs.entropy, "entropy", self)
        advantages = required(batch.advantages, "advantages", self)
        weights = required(batch.loss_weights, "loss_weights", self)
        shares = required(batch.token_shares, "token_shares", self)

        current = log_probs.detach()
        old = current if batch.old_log_probs is None else batch.old_log_probs
        # Tokens outside of responses have no old log-prob: exp() of what stands there may overflow,
        # and infinity times a weight of 0 is NaN.
        log_ratio = torch.where(batch.response_mask, log_probs - old, 0.0)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        metrics = {}
        corrected = weights
        if self.importance != "none":
            drawn = required(batch.rollout_log_probs, "rollout_log_probs", self)
            log_importance = torch.where(batch.response_mask, old - drawn, 0.0)
            importance = log_importance.exp()
            if self.importance == "truncated":
                corrected = weights * importance.clamp(max=self.importance_cap)
            metrics = {
                "rollout/importance_mean": torch.sum(shares * importance),
                "rollout/importance_clip_fraction": torch.sum(shares * (importance > self.importance_cap)),
                "rollout/kl": torch.sum(shares * (importance - 1.0 - log_importance)),
            }
        policy = torch.sum(corrected * -torch.minimum(ratio * advantages, clipped * advantages))
        bonus = torch.sum(weights * entropy)
        loss = policy - self.entropy_coefficient * bonus

        kl = torch.zeros_like(policy)
        if self.kl_coefficient > 0.0:
            reference = required(batch.reference_log_probs, "reference_log_probs", self)
            divergence = KL_ESTIMATORS[self.kl_estimator](
                torch.where(batch.response_mask, log_probs, 0.0), torch.where(batch.response_mask, reference, 0.0)
            )
            kl = torch.sum(weights * divergence)
            loss = loss + self.kl_coefficient * kl

        limited = torch.where(advantages > 0, ratio > 1.0 + self.clip_high, ratio < 1.0 - self.clip_low)
        metrics |= {
            "loss/total": loss,
            "loss/policy": policy,
            "loss/kl": kl,
            "policy/entropy": torch.sum(shares * entropy),
            "policy/ratio_mean": torch.sum(shares * ratio),
            "policy/clip_fraction": torch.sum(shares * (limited & (advantages != 0))),
        }
        if batch.rollout_log_probs is not None:
            difference = (old - batch.rollout_log_probs).abs()
            metrics["rollout/log_prob_abs_diff"] = torch.sum(shares * difference)
        return LossOutputs(loss=loss, metrics={name: value.detach() for name, value in metrics.items()})
