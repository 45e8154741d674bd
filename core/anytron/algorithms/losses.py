"""Losses: of a policy's tokens, of a critic's values and of supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from anytron.algorithms.contract import LossOutputs, TokenLosses, required

if TYPE_CHECKING:
    from torch import Tensor

    from anytron.algorithms.contract import PolicyTokens
    from anytron.config.algorithm import AlgorithmSection
    from anytron.sequences.batch import RaggedBatch, TokenOutputs


def cispo(tokens: PolicyTokens, algorithm: AlgorithmSection) -> TokenLosses:
    """Clip the weight of a token's gradient and not the gradient itself. ``algorithm.loss=cispo``.

    Every token keeps its gradient (CISPO, arXiv:2506.13585). Per token, with ``sg`` stopping the gradient (eq. 4
    and 5)::

        -sg(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * log p

    The paper has no lower bound; ``clip_low=1`` has the same effect.
    """
    low, high = 1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high
    ratio = tokens.log_ratio().detach().exp()
    capped = ((ratio > high) | (ratio < low)) & (tokens.advantages != 0)
    losses = -ratio.clamp(low, high) * tokens.advantages * tokens.log_probs
    return TokenLosses(losses, {"policy/capped_fraction": capped})


def ppo_clip(tokens: PolicyTokens, algorithm: AlgorithmSection) -> TokenLosses:
    """Stop the gradient of a token whose ratio has left the clip range. ``algorithm.loss=ppo_clip``.

    A token keeps its gradient if its ratio has left the range against the direction of its advantage. Per token, with
    ``ratio = p / p_old`` and advantage ``A``::

        -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

    (PPO, arXiv:1707.06347, eq. 7; two bounds as in DAPO, arXiv:2503.14476, eq. 10.) With ``dual_clip = c``, where
    ``A < 0`` no token costs more than ``-c * A`` (arXiv:1912.09729, eq. 5): otherwise a bad token that has become
    likely would outweigh all others. If a batch is used for one update only, the ratio is 1 and the gradient of the
    loss is the policy gradient.
    """
    return clipped(tokens.log_ratio().exp(), tokens.advantages, algorithm)


def clipped(ratio: Tensor, advantages: Tensor, algorithm: AlgorithmSection) -> TokenLosses:
    """Compute the clipped loss of given ratios, ``[T]``, and which tokens have no gradient because of clipping."""
    low, high = 1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high
    losses = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    limited = torch.where(advantages > 0, ratio > high, ratio < low) & (advantages != 0)
    if algorithm.dual_clip is not None:
        most = -algorithm.dual_clip * advantages
        limited = limited | ((advantages < 0) & (losses > most))
        losses = torch.where(advantages < 0, torch.minimum(losses, most), losses)
    return TokenLosses(losses, {"policy/clip_fraction": limited})


def gspo(tokens: PolicyTokens, algorithm: AlgorithmSection) -> TokenLosses:
    """Clip by the geometric mean of a response's ratios. ``algorithm.loss=gspo``.

    With ``s_i = (p(y_i) / p_old(y_i))^(1 / |y_i|)`` a response costs (GSPO, arXiv:2507.18071, eq. 5
    to 7)::

        -min(s_i * A, clip(s_i, 1 - clip_low, 1 + clip_high) * A)

    Each token of the response has that loss, so that ``aggregation=sequence-mean`` is the paper's mean over responses.
    The paper's bounds are small: 3e-4 and 4e-4 in section 5.1.
    """
    ratio = tokens.sequence_mean(tokens.log_ratio()).exp()
    return clipped(tokens.to_tokens(ratio), tokens.advantages, algorithm)


def gspo_token(tokens: PolicyTokens, algorithm: AlgorithmSection) -> TokenLosses:
    """Clip by the ratio of the whole response, but differentiate each token by itself. ``algorithm.loss=gspo_token``.

    The ratio is ``sg(s_i) * p / sg(p)``, with ``sg`` stopping the gradient (GSPO, arXiv:2507.18071, eq. 13 and 14):
    its value is the ratio of :func:`gspo`, and tokens of one response may have different advantages. Where they have
    the same advantage, and with ``aggregation=sequence-mean``, both losses have the same gradient.
    """
    mean = tokens.sequence_mean(tokens.log_ratio().detach())
    own = (tokens.log_probs - tokens.log_probs.detach()).exp()
    return clipped(tokens.to_tokens(mean.exp()) * own, tokens.advantages, algorithm)


def sapo(tokens: PolicyTokens, algorithm: AlgorithmSection) -> TokenLosses:
    """Let a token's gradient fade as its ratio leaves 1. ``algorithm.loss=sapo``.

    Per token, with one temperature ``tau`` for positive advantages and another for all others (SAPO,
    arXiv:2511.20347, eq. 5 and 6)::

        -(4 / tau) * sigmoid(tau * (ratio - 1)) * A

    At a ratio of 1 the gradient is the policy gradient. With a larger temperature it fades faster; in the paper tokens
    with negative advantages fade a little faster than the others.
    """
    ratio = tokens.log_ratio().exp()
    positive, negative = algorithm.sapo_tau_positive, algorithm.sapo_tau_negative
    tau = negative + (positive - negative) * (tokens.advantages > 0).to(ratio.dtype)
    gate = torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
    return TokenLosses(-gate * tokens.advantages)


@dataclass(frozen=True)
class SupervisedLoss:
    """Cross-entropy with the responses of the data: the negative log-prob of each of their tokens. Picklable.

    Over the response tokens of a mini-batch, with the weights of ``algorithm.aggregation``::

        -sum of weight * log p(token | tokens before it)

    With ``token-mean`` this is the loss of Hugging Face's models for ``labels`` that are -100 outside of responses.
    """

    def __call__(self, outputs: TokenOutputs, batch: RaggedBatch) -> LossOutputs:
        """Compute one micro-batch's part of the loss.

        Args:
            outputs: Outputs of the model with ``log_probs`` and ``entropy``.
            batch: The micro-batch on the same device, with ``loss_weights`` and ``token_shares``.

        Raises:
            DataError: A field that the loss needs is missing.
        """
        weights = required(batch.loss_weights, "loss_weights", "SupervisedLoss")
        shares = required(batch.token_shares, "token_shares", "SupervisedLoss")
        log_probs = torch.where(batch.response_mask, required(outputs.log_probs, "log_probs", "SupervisedLoss"), 0.0)
        entropy = torch.where(batch.response_mask, required(outputs.entropy, "entropy", "SupervisedLoss"), 0.0)
        loss = -torch.sum(weights * log_probs)
        metrics = {
            "loss/total": loss,
            "loss/nll": -torch.sum(shares * log_probs),
            "policy/entropy": torch.sum(shares * entropy),
        }
        return LossOutputs(loss=loss, metrics={name: value.detach() for name, value in metrics.items()})


@dataclass(frozen=True)
class ValueLoss:
    """Half of the squared error of a critic's values, clipped as PPO's code does it. Picklable.

    Per token, with the value ``V``, and ``V_old``, the value before the step's updates::

        0.5 * max((V - return)^2, (clip(V, V_old - clip, V_old + clip) - return)^2)

    A value that has moved by more than ``clip`` in the right direction gains nothing by moving on
    (https://github.com/openai/baselines, baselines/ppo2/model.py; the paper does not mention it).

    Attributes:
        clip: Largest change of a value in a step; 0 = no limit.
    """

    clip: float = 0.5

    def __call__(self, outputs: TokenOutputs, batch: RaggedBatch) -> LossOutputs:
        """Compute one micro-batch's part of the loss.

        Args:
            outputs: Outputs of the model with ``values``.
            batch: The micro-batch on the same device, with ``values``, ``returns``, ``loss_weights`` and
                ``token_shares``.

        Raises:
            DataError: A field that the loss needs is missing.
        """
        values = required(outputs.values, "values", "ValueLoss")
        old = required(batch.values, "values", "ValueLoss")
        returns = required(batch.returns, "returns", "ValueLoss")
        weights = required(batch.loss_weights, "loss_weights", "ValueLoss")
        shares = required(batch.token_shares, "token_shares", "ValueLoss")

        error = (values - returns).square()
        limited = torch.zeros_like(batch.response_mask)
        if self.clip > 0.0:
            held = (torch.clamp(values, old - self.clip, old + self.clip) - returns).square()
            limited = held > error
            error = torch.maximum(error, held)
        loss = 0.5 * torch.sum(weights * error)
        metrics = {
            "critic/loss": loss,
            "critic/value_mean": torch.sum(shares * values),
            "critic/return_mean": torch.sum(shares * returns),
            "critic/clip_fraction": torch.sum(shares * limited),
        }
        return LossOutputs(loss=loss, metrics={name: value.detach() for name, value in metrics.items()})
