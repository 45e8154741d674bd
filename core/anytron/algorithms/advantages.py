"""Advantages: from the rewards of a step to an advantage for each token.

GRPO, Dr. GRPO and REINFORCE leave-one-out compare the responses to one prompt with each other; groups may have
different sizes. PPO compares with a critic (generalized advantage estimation), and REINFORCE++ (arXiv:2501.03262)
gives returns a common scale over the whole step.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from anytron.algorithms.contract import Advantages, required
from anytron.sequences.ranges import bounds_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from anytron.config.algorithm import AlgorithmSection
    from anytron.sequences.batch import RaggedBatch


def group_sizes(groups: Tensor) -> list[int]:
    """Count the samples of each of the ``P`` groups; ``groups``, int64 ``[N]``, has the group number of each sample."""
    sizes: list[int] = torch.unique_consecutive(groups, return_counts=True)[1].tolist()
    return sizes


def by_group(values: Tensor, groups: Tensor) -> Tensor:
    """Arrange samples with a row for each group.

    Args:
        values: float ``[N]``.
        groups: int64 ``[N]``, the number of each sample's group; samples of a group are adjacent.

    Returns:
        ``[P, G]`` with the size G of the largest group; NaN after the end of a smaller group.
    """
    return pad_sequence(list(values.split(group_sizes(groups))), batch_first=True, padding_value=torch.nan)


def compare(values: Tensor, groups: Tensor, formula: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply to samples a formula that compares the values of each group.

    Args:
        values: float ``[N]``, finite.
        groups: As in :func:`by_group`.
        formula: Maps ``[P, G]`` to ``[P, G]``, where NaN marks the entries after the end of a group.

    Returns:
        ``[N]``.
    """
    rows = by_group(values, groups)
    return formula(rows)[~rows.isnan()]


def differ(rewards: Tensor) -> Tensor:
    """Return which groups have signal: those in which not all rewards are equal (DAPO, arXiv:2503.14476, eq. 11).

    In the other groups no response is better or worse than the rest. Rewards are compared for exact equality, because
    rounding can give equal rewards a standard deviation that is not quite 0.

    Args:
        rewards: float ``[P, G]``; NaN at the end of a smaller group.

    Returns:
        bool ``[P]``.
    """
    return rewards.nan_to_num(-torch.inf).amax(dim=1) > rewards.nan_to_num(torch.inf).amin(dim=1)


def have_signal(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return which samples belong to a group with signal (:func:`differ`).

    Args:
        rewards: float ``[N]``; NaN for a sample that is not trained on.
        groups: As in :func:`by_group`.

    Returns:
        bool ``[N]``, the same for all samples of a group.
    """
    return differ(by_group(rewards, groups)).repeat_interleave(torch.tensor(group_sizes(groups)))


VARIANCE_EPSILON = 1e-8
"""Added to the variance of advantages before they are divided by its root; verl's value (``masked_whiten``)."""


def broadcast_to_tokens(per_sequence: Tensor, lengths: Tensor, response_mask: Tensor) -> Tensor:
    """Give every response token the value of its sequence.

    Args:
        per_sequence: float32 ``[B]``.
        lengths: int64 ``[B]``, tokens of each sequence, prompt included.
        response_mask: bool ``[T]``, True = the token was generated.

    Returns:
        float32 ``[T]``, 0 outside of responses.
    """
    per_token = torch.from_numpy(np.repeat(per_sequence.numpy(), lengths.numpy()))  # several times as fast as torch
    return per_token.masked_fill_(~response_mask, 0.0)


def place_at_end(rewards: Tensor, lengths: Tensor, response_mask: Tensor) -> Tensor:
    """Place each response's reward at its last generated token.

    Args:
        rewards: float ``[B]``, rewards of whole responses; the reward of an empty response is dropped.
        lengths: int64 ``[B]``, tokens of each sequence, prompt included.
        response_mask: bool ``[T]``, True = the token was generated.

    Returns:
        ``[T]``, dtype of ``rewards``, 0 elsewhere.
    """
    starts, ends = bounds_of(response_mask.numpy())
    starts, ends = np.append(-1, starts), np.append(0, ends)  # the first range is that of a sequence without any
    stops = lengths.cumsum(0).numpy()
    last = np.minimum(ends[np.searchsorted(starts, stops) - 1], stops) - 1
    answered = last >= stops - lengths.numpy()
    placed = rewards.new_zeros(response_mask.numel())
    placed[torch.from_numpy(last[answered])] = rewards[torch.from_numpy(answered)]
    return placed


def whiten(advantages: Tensor, response_mask: Tensor) -> Tensor:
    """Normalize the advantages of response tokens to mean 0 and (unbiased) variance 1; equal ones become 0.

    Args:
        advantages: float ``[T]``.
        response_mask: bool ``[T]``, True = the token was generated.

    Returns:
        ``[T]``, 0 outside of responses.
    """
    chosen = advantages[response_mask]
    centred = chosen - chosen.mean()
    variance = centred.square().sum() / max(chosen.numel() - 1, 1)
    whitened = torch.zeros_like(advantages)
    whitened[response_mask] = centred * torch.rsqrt(variance + VARIANCE_EPSILON)
    return whitened


STD_EPSILON = 1e-4
"""Added to a group's standard deviation; TRL's value (trl/trainer/grpo_trainer.py)."""


def grpo(rewards: Tensor, normalize_std: bool) -> Tensor:
    """Compare each response with its group (GRPO, arXiv:2402.03300, section 4.1.2).

    The advantage is the reward minus the group's mean, divided by the group's standard deviation
    (unbiased, as in TRL and verl). A group whose rewards are all equal, and therefore also a group
    of one response, has advantages of exactly zero, never NaN.

    Args:
        rewards: ``[P, G]``, G responses to each of P prompts; NaN at the end of a smaller group.
        normalize_std: Divide by the standard deviation; False gives the advantage of Dr. GRPO (arXiv:2503.20783,
            section 3.2), which does not favour prompts whose rewards hardly vary.

    Returns:
        ``[P, G]``, same dtype; 0 where the reward is NaN.
    """
    compared = ~rewards.isnan()
    count = compared.sum(dim=1, keepdim=True)
    centred = rewards - rewards.nansum(dim=1, keepdim=True) / count.clamp(min=1)
    # The mean of equal numbers can differ from them in the last bit.
    centred = torch.where(compared & differ(rewards)[:, None], centred, torch.zeros_like(centred))
    if not normalize_std:
        return centred
    deviation = (centred.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    return centred / (deviation + STD_EPSILON)


def group_advantages(batch: RaggedBatch, rewards: Tensor, algorithm: AlgorithmSection) -> Advantages:
    """Return, for every response token, its response's advantage in the group (``algorithm.advantage=grpo``).

    Raises:
        DataError: The batch has no ``groups``.
    """
    return Advantages(_of_responses(batch, rewards, partial(grpo, normalize_std=algorithm.normalize_std), "grpo"))


def centred_group_advantages(batch: RaggedBatch, rewards: Tensor, algorithm: AlgorithmSection) -> Advantages:
    """Return the advantages of GRPO without the standard deviation (``algorithm.advantage=dr_grpo``).

    Raises:
        DataError: The batch has no ``groups``.
    """
    del algorithm
    return Advantages(_of_responses(batch, rewards, partial(grpo, normalize_std=False), "dr_grpo"))


def rloo(rewards: Tensor) -> Tensor:
    """Subtract from each reward the mean of the other rewards of its group (RLOO, arXiv:2402.14740, section 3.3).

    With G responses this is ``G / (G - 1)`` times the difference from the mean of all. A group of one response
    and a group whose rewards are all equal get exactly 0.

    Args:
        rewards: ``[P, G]``, G responses to each of P prompts; NaN at the end of a smaller group.

    Returns:
        ``[P, G]``, same dtype; 0 where the reward is NaN.
    """
    count = (~rewards.isnan()).sum(dim=1, keepdim=True).to(rewards.dtype)
    return grpo(rewards, normalize_std=False) * (count / (count - 1).clamp(min=1))


def leave_one_out_advantages(batch: RaggedBatch, rewards: Tensor, algorithm: AlgorithmSection) -> Advantages:
    """Return, for every response token, the advantage of :func:`rloo` (``algorithm.advantage=rloo``).

    Raises:
        DataError: The batch has no ``groups``.
    """
    del algorithm
    return Advantages(_of_responses(batch, rewards, rloo, "rloo"))


def _of_responses(batch: RaggedBatch, rewards: Tensor, formula: Callable[[Tensor], Tensor], name: str) -> Tensor:
    """Apply a formula of groups, and give every response token its response's value: ``[T]``."""
    groups, responses = required(batch.groups, "groups", name), batch.responses
    if responses is None:
        per_sequence = compare(rewards, groups, formula)
    else:  # a response counts once in its group, however many sequences it has
        sizes = torch.tensor(group_sizes(responses))
        first = sizes.cumsum(0) - sizes
        per_sequence = compare(rewards[first], groups[first], formula).repeat_interleave(sizes)
    return broadcast_to_tokens(per_sequence, batch.lengths, batch.response_mask)


def no_advantages(batch: RaggedBatch, rewards: Tensor, algorithm: AlgorithmSection) -> Advantages:
    """Return the advantage 0 for every token (``algorithm.advantage=none``)."""
    del rewards, algorithm
    return Advantages(torch.zeros(batch.num_tokens))


def gae(
    token_rewards: Tensor, values: Tensor, lengths: Tensor, response_mask: Tensor, *, gamma: float, gae_lambda: float
) -> Tensor:
    """Compute generalized advantage estimates (arXiv:1506.02438, equation 16).

    The state before a response token is all the text before it. Drawing the token earns its reward and leads to the
    next state::

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t = delta_t + gamma * gae_lambda * A_{t+1}

    Nothing follows the last token, whether an end token or the length limit ended the response: its
    ``V_{t+1}`` is 0. Tokens inside of a response that were not generated are not states; they are skipped.

    Args:
        token_rewards: float ``[T]``, the reward of each token; only responses count.
        values: float ``[T]``; entry t is the value of the state before token t.
        lengths: int64 ``[B]``, tokens of each sequence, prompt included.
        response_mask: bool ``[T]``, True = the token was generated.
        gamma: Discount per token.
        gae_lambda: 0 trusts the values (one step ahead), 1 the outcome (all steps).

    Returns:
        ``[T]``, dtype of ``values``, 0 outside of responses. Advantages plus values are the returns, the targets of the
        critic.
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
    """Return the advantages of :func:`gae` with the critic's values, and the returns (``algorithm.advantage=gae``).

    Raises:
        DataError: The batch has no ``token_rewards`` or no ``values``.
    """
    del rewards
    token_rewards = required(batch.token_rewards, "token_rewards", "gae")
    values, mask = required(batch.values, "values", "gae"), batch.response_mask
    advantages = gae(token_rewards, values, batch.lengths, mask, gamma=algorithm.gamma, gae_lambda=algorithm.gae_lambda)
    returns = (advantages + values) * mask
    return Advantages(whiten(advantages, mask) if algorithm.normalize_std else advantages, returns)


def explained_variance(values: Tensor, returns: Tensor, response_mask: Tensor) -> float:
    """Return the part of the returns' variance that values explain: ``1 - Var(returns - values) / Var(returns)``.

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


def return_advantages(batch: RaggedBatch, rewards: Tensor, algorithm: AlgorithmSection) -> Advantages:
    """Return the return of every token, whitened over the step (``algorithm.advantage=reinforce_plus_plus``).

    The return is ``R_t = r_t + gamma * R_{t+1}`` over the response's own tokens (arXiv:2501.03262, section 3.1). It is
    what generalized advantage estimation gives without values and with a lambda of 1.

    Raises:
        DataError: The batch has no ``token_rewards``.
    """
    del rewards
    token_rewards = required(batch.token_rewards, "token_rewards", "reinforce_plus_plus")
    nothing = torch.zeros_like(token_rewards)
    mask = batch.response_mask
    returns = gae(token_rewards, nothing, batch.lengths, mask, gamma=algorithm.gamma, gae_lambda=1.0)
    return Advantages(whiten(returns, mask))


def returns_against_group(batch: RaggedBatch, rewards: Tensor, algorithm: AlgorithmSection) -> Advantages:
    """Subtract the group's mean, then whiten over the step (``algorithm.advantage=reinforce_plus_plus_baseline``).

    The group's mean is the baseline, and the standard deviation of the whole step is the scale. Dividing by the group's
    own deviation would amplify groups whose rewards hardly vary (arXiv:2501.03262, section 3.2).

    Raises:
        DataError: The batch has no ``groups``.
    """
    del algorithm
    centred = partial(grpo, normalize_std=False)
    per_token = _of_responses(batch, rewards, centred, "reinforce_plus_plus_baseline")
    return Advantages(whiten(per_token, batch.response_mask))


def overlong_penalties(lengths: Tensor, longest: int, buffer: int) -> Tensor:
    """Punish length linearly within the last tokens before the limit (DAPO, arXiv:2503.14476, eq. 13).

    With ``b`` tokens of buffer before the limit ``L`` a response of ``l`` tokens gets::

        0                  where l <= L - b
        (L - b - l) / b    where L - b < l <= L
        -1                 where L < l

    Args:
        lengths: int64 ``[N]``, tokens of each response.
        longest: ``L``, the limit, in tokens.
        buffer: ``b``, in tokens, from 1 to ``L``.

    Returns:
        float32 ``[N]``, from -1 to 0.
    """
    return ((longest - buffer - lengths) / buffer).clamp(-1.0, 0.0)
