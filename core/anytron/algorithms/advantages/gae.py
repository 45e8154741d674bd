"""Estimate each token's advantage with a critic: generalized advantage estimation, as PPO uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from anytron.algorithms.advantages.groups import whiten
from anytron.algorithms.contract import Advantages, required

if TYPE_CHECKING:
    from anytron.config.algorithm import AlgorithmSection
    from anytron.sequences.batch import RaggedBatch


def gae(
    token_rewards: Tensor, values: Tensor, lengths: Tensor, response_mask: Tensor, *, gamma: float, gae_lambda: float
) -> Tensor:
    """Weigh temporal differences of values against the outcome (arXiv:1506.02438, equation 16).

    A state is what stands before a response token, drawing the token leaves it, and its reward follows::

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t = delta_t + gamma * gae_lambda * A_{t+1}

    Nothing follows the last token, whether an end token or the length limit ended the response: its
    ``V_{t+1}`` is 0. Tokens inside of a response that were not generated are no states; they are passed over.

    Args:
        token_rewards: float ``[T]``, what follows each token; looked at in responses only.
        values: float ``[T]``, entry t of the state before token t.
        lengths: int64 ``[B]``, tokens of each sequence, prompt included.
        response_mask: bool ``[T]``, True = the token was generated.
        gamma: Discount of what comes a token later.
        gae_lambda: 0 trusts the values (one step ahead), 1 the outcome (all steps).

    Returns:
        ``[T]``, dtype of ``values``, 0 outside of responses. With the values added, these are the returns
        that the values should have been.
    """
    sequence = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)[response_mask]
    counts = torch.bincount(sequence, minlength=lengths.numel())

    def rows(per_token: Tensor) -> Tensor:
        return pad_sequence(list(torch.split(per_token[response_mask], counts.tolist())), batch_first=True)

    padded = rows(values)
    differences = gamma * torch.nn.functional.pad(padded, (0, 1))[:, 1:] - padded + rows(token_rewards.to(values.dtype))
    # Behind a response's end all differences are 0, and so is what is carried to it from there.
    columns = []
    carried = values.new_zeros(lengths.numel())
    for difference in reversed(differences.unbind(1)):
        carried = difference + gamma * gae_lambda * carried
        columns.append(carried)
    advantages = torch.zeros_like(values)
    if columns:
        real = torch.arange(padded.shape[1]) < counts[:, None]
        advantages[response_mask] = torch.stack(columns[::-1], dim=1)[real]
    return advantages


def critic_advantages(batch: RaggedBatch, rewards: Tensor, algorithm: AlgorithmSection) -> Advantages:
    """Compare each token with what the critic expected (``algorithm.advantage=gae``)."""
    del rewards
    token_rewards = required(batch.token_rewards, "token_rewards", "gae")
    values, mask = required(batch.values, "values", "gae"), batch.response_mask
    advantages = gae(token_rewards, values, batch.lengths, mask, gamma=algorithm.gamma, gae_lambda=algorithm.gae_lambda)
    returns = (advantages + values) * mask
    return Advantages(whiten(advantages, mask) if algorithm.normalize_std else advantages, returns)


def explained_variance(values: Tensor, returns: Tensor, response_mask: Tensor) -> float:
    """Say how much of the returns the values knew: ``1 - Var(returns - values) / Var(returns)``.

    Args:
        values: float ``[T]``.
        returns: float ``[T]``.
        response_mask: bool ``[T]``, the tokens that count.

    Returns:
        1 for a perfect critic, 0 for a constant one, negative for one that is worse; 0 where returns do not vary.
    """
    returns, values = returns[response_mask].double(), values[response_mask].double()
    variance = returns.var(unbiased=False)
    if not variance > 0.0:
        return 0.0
    return (1.0 - (returns - values).var(unbiased=False) / variance).item()
