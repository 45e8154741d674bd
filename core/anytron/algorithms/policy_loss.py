"""The policy's loss: a loss per token, corrected for importance and averaged, with KL penalty and entropy bonus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anytron.algorithms.bitwise import require_equal
from anytron.algorithms.contract import LossOutputs, PolicyTokens, TokenLosses, required
from anytron.algorithms.importance import correct
from anytron.algorithms.kl import KL_ESTIMATORS
from anytron.algorithms.registered import LOSS, LOSSES, call, misfit, policy_loss_function, unusable
from anytron.base.metric import is_maximum

if TYPE_CHECKING:
    from anytron.config.algorithm import AlgorithmSection
    from anytron.sequences.batch import RaggedBatch, TokenOutputs

OWNER = "PolicyLoss"
USER_METRICS = "loss/metrics/"
"""Prefix of the names of metrics that a user's loss returns."""


@dataclass(frozen=True)
class PolicyLoss:
    """The loss that ``algorithm`` describes. Picklable: each rank imports a user's function by its name.

    Over the response tokens of a mini-batch, with the weights of ``algorithm.aggregation``::

        sum of weight * (correction * loss + kl_coefficient * KL(p || reference) - entropy_coefficient * entropy)

    The loss of a token is what ``algorithm.loss`` names; corrections are in :mod:`anytron.algorithms.importance`, the
    KL estimators in :mod:`anytron.algorithms.kl` (a penalty that is part of the reward is not here). If the batch
    has no old log-probs, it is used for one update only, and the current log-probs take their place.

    Attributes:
        algorithm: Section ``algorithm`` of the configuration.
        bitwise: The run's configuration file if old log-probs must be equal to the rollout's to the bit
            (:func:`anytron.algorithms.bitwise.require_equal`); empty = they may differ.
    """

    algorithm: AlgorithmSection
    bitwise: str = ""

    def __call__(self, outputs: TokenOutputs, batch: RaggedBatch) -> LossOutputs:
        """Compute one micro-batch's part of the loss.

        Args:
            outputs: Outputs of the model with ``log_probs`` and ``entropy``.
            batch: The micro-batch on the same device, with ``advantages``, ``loss_weights`` and
                ``token_shares``.

        Raises:
            DataError: A field that the loss needs is missing, or a user's function raises or returns an invalid value.
            EngineError: Log-probs must be equal to the rollout's, and are not.
        """
        algorithm = self.algorithm
        weights = required(batch.loss_weights, "loss_weights", OWNER)
        shares = required(batch.token_shares, "token_shares", OWNER)
        tokens = policy_tokens(outputs, batch)
        mismatch = None
        if self.bitwise:
            required(batch.rollout_log_probs, "rollout_log_probs", OWNER)
            mismatch = require_equal(tokens, batch, self.bitwise)
        found = self._per_token(tokens)
        # Outside of responses a user's function may give infinity, and that times a weight of 0 is NaN.
        losses = torch.where(batch.response_mask, found.per_token, 0.0)
        metrics = {name: _part(name, values, shares) for name, values in found.metrics.items()}
        corrected = weights
        if algorithm.importance_correction not in ("none", "auto"):
            correction = correct(tokens, shares, algorithm)
            corrected = weights * correction.factor
            metrics |= correction.metrics
        policy = torch.sum(corrected * losses)
        loss = policy - algorithm.entropy_coefficient * torch.sum(weights * tokens.entropy)

        kl = torch.zeros_like(policy)
        if algorithm.kl_coefficient > 0.0 and algorithm.kl_placement == "loss":
            reference = required(batch.reference_log_probs, "reference_log_probs", OWNER)
            reference = torch.where(batch.response_mask, reference, 0.0)
            divergence = KL_ESTIMATORS[algorithm.kl_estimator](tokens.log_probs, reference)
            kl = torch.sum(weights * divergence)
            loss = loss + algorithm.kl_coefficient * kl
            metrics["policy/kl"] = torch.sum(shares * divergence)

        metrics |= {
            "loss/total": loss,
            "loss/policy": policy,
            "loss/kl": kl,
            "policy/entropy": torch.sum(shares * tokens.entropy),
            "policy/ratio_mean": torch.sum(shares * tokens.log_ratio().exp()),
        }
        if tokens.rollout_log_probs is not None:
            difference = (tokens.old_log_probs - tokens.rollout_log_probs).abs()
            metrics["rollout/log_prob_abs_diff"] = torch.sum(shares * difference)
        if mismatch is not None:
            metrics["policy/rollout_mismatch"] = torch.sum(shares * mismatch)
        return LossOutputs(loss=loss, metrics={name: value.detach() for name, value in metrics.items()})

    def _per_token(self, tokens: PolicyTokens) -> TokenLosses:
        name = self.algorithm.loss
        function = policy_loss_function(self.algorithm)
        found: TokenLosses = call(LOSS, name, function, tokens, self.algorithm)
        if name in LOSSES:
            return found
        # Whether its numbers are finite is seen after the update: to look here would wait for the device.
        refused = partial(unusable, LOSS, name, function)
        if not isinstance(found, TokenLosses):
            raise refused(f"a {type(found).__name__}, not a TokenLosses")
        if not isinstance(found.metrics, Mapping):
            raise refused(f"metrics that are a {type(found.metrics).__name__}, not a mapping")
        for what, values in {"per_token": found.per_token, **found.metrics}.items():
            if fault := misfit(what, values, tokens.log_probs.numel()):
                raise refused(fault)
        if tokens.log_probs.requires_grad and not found.per_token.requires_grad:
            raise refused("losses without a gradient, not made of tokens.log_probs")
        # Whatever they are called, they are none of ours: one named `reward/mean` would take its place.
        return replace(found, metrics={f"{USER_METRICS}{metric}": values for metric, values in found.metrics.items()})


def _part(name: str, values: Tensor, shares: Tensor) -> Tensor:
    """Average a metric over the tokens that count, or take its maximum if its name ends in ``_max``."""
    if not is_maximum(name):
        return torch.sum(torch.where(shares > 0, shares * values, 0.0))
    return torch.where(shares > 0, values, -torch.inf).amax()


def policy_tokens(outputs: TokenOutputs, batch: RaggedBatch) -> PolicyTokens:
    """Make the input of a policy loss from a micro-batch.

    Args:
        outputs: Outputs of the model with ``log_probs`` and ``entropy``.
        batch: Micro-batch with ``advantages``.

    Raises:
        DataError: A required field is missing.
    """
    mask = batch.response_mask

    def inside(values: Tensor) -> Tensor:
        return torch.where(mask, values, 0.0)

    log_probs = inside(required(outputs.log_probs, "log_probs", OWNER))
    sequence = torch.repeat_interleave(torch.arange(batch.num_sequences), batch.lengths)
    return PolicyTokens(
        log_probs=log_probs,
        old_log_probs=log_probs.detach() if batch.old_log_probs is None else inside(batch.old_log_probs),
        advantages=inside(required(batch.advantages, "advantages", OWNER)),
        response_mask=mask,
        sequence=sequence.to(mask.device, non_blocking=True),
        num_sequences=batch.num_sequences,
        entropy=inside(required(outputs.entropy, "entropy", OWNER)),
        rollout_log_probs=None if batch.rollout_log_probs is None else inside(batch.rollout_log_probs),
    )
