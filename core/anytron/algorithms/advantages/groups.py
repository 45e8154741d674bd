"""Advantages from the rewards of a group: GRPO, Dr. GRPO and REINFORCE leave-one-out.

They compare the responses to one prompt with each other. Groups may have different sizes. The values of sequences are
then brought to their tokens, and the tokens of a step may get a common scale.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from anytron.algorithms.contract import Advantages, required

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from anytron.config.algorithm import AlgorithmSection
    from anytron.sequences.batch import RaggedBatch


def group_sizes(groups: Tensor) -> list[int]:
    """Count the samples of each group, ``P`` groups, from the number of each sample's group, int64 ``[N]``."""
    sizes: list[int] = torch.unique_consecutive(groups, return_counts=True)[1].tolist()
    return sizes


def by_group(values: Tensor, groups: Tensor) -> Tensor:
    """Give each group a row.

    Args:
        values: float ``[N]``.
        groups: int64 ``[N]``, the number of each sample's group; those of a group stand side by side.

    Returns:
        ``[P, G]`` with the size G of the largest group; NaN behind the end of a smaller one.
    """
    return pad_sequence(list(values.split(group_sizes(groups))), batch_first=True, padding_value=torch.nan)


def compare(values: Tensor, groups: Tensor, formula: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a formula of groups to samples.

    Args:
        values: float ``[N]``, finite.
        groups: As in :func:`by_group`.
        formula: Maps ``[P, G]`` to ``[P, G]``, where NaN says that a group has no further sample.

    Returns:
        ``[N]``.
    """
    rows = by_group(values, groups)
    return formula(rows)[~rows.isnan()]


def differ(rewards: Tensor) -> Tensor:
    """Say which groups have signal: those in which not all rewards are equal (DAPO, arXiv:2503.14476, eq. 11).

    In the others nothing is better or worse than the rest. Equal is exact: because of rounding, equal rewards can have
    a deviation that is not quite 0.

    Args:
        rewards: float ``[P, G]``; NaN where there is none.

    Returns:
        bool ``[P]``.
    """
    return rewards.nan_to_num(-torch.inf).amax(dim=1) > rewards.nan_to_num(torch.inf).amin(dim=1)


def have_signal(rewards: Tensor, groups: Tensor) -> Tensor:
    """Say which samples belong to a group with signal (:func:`differ`).

    Args:
        rewards: float ``[N]``; NaN for a sample that nothing is learnt from.
        groups: As in :func:`by_group`.

    Returns:
        bool ``[N]``, the same for all samples of a group.
    """
    return differ(by_group(rewards, groups)).repeat_interleave(torch.tensor(group_sizes(groups)))


VARIANCE_EPSILON = 1e-8
"""Added to the variance that advantages are divided by the root of; verl's value (``masked_whiten``)."""


def broadcast_to_tokens(per_sequence: Tensor, lengths: Tensor, response_mask: Tensor) -> Tensor:
    """Give every response token its sequence's value.

    Args:
        per_sequence: float32 ``[B]``.
        lengths: int64 ``[B]``, tokens of each sequence, prompt included.
        response_mask: bool ``[T]``, True = the token was generated.

    Returns:
        float32 ``[T]``, 0 outside of responses.
    """
    return torch.where(response_mask, torch.repeat_interleave(per_sequence, lengths), 0.0)


def place_at_end(rewards: Tensor, lengths: Tensor, response_mask: Tensor) -> Tensor:
    """Give each response's reward to its last generated token.

    Args:
        rewards: float ``[B]``, of whole responses; that of an empty response goes nowhere.
        lengths: int64 ``[B]``, tokens of each sequence, prompt included.
        response_mask: bool ``[T]``, True = the token was generated.

    Returns:
        ``[T]``, dtype of ``rewards``, 0 elsewhere.
    """
    sequence = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    last = torch.full_like(lengths, -1).scatter_reduce(
        0, sequence[response_mask], response_mask.nonzero().flatten(), "amax"
    )
    answered = last >= 0
    placed = rewards.new_zeros(response_mask.numel())
    placed[last[answered]] = rewards[answered]
    return placed


def whiten(advantages: Tensor, response_mask: Tensor) -> Tensor:
    """Give the advantages of response tokens mean 0 and (unbiased) variance 1; equal ones become 0.

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
    (unbiased, as TRL and verl take it). A group whose rewards are all equal, so also a group of
    one, has exactly zero advantages, never NaN.

    Args:
        rewards: ``[P, G]``; NaN where a group has no further response.
        normalize_std: Divide by the standard deviation; off is the advantage of Dr. GRPO (arXiv:2503.20783, section
            3.2), which does not favour prompts whose rewards hardly vary.

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
    """Give every response token the advantage of its response in its group (``algorithm.advantage=grpo``)."""
    groups = required(batch.groups, "groups", "grpo")
    per_sequence = compare(rewards, groups, partial(grpo, normalize_std=algorithm.normalize_std))
    return Advantages(broadcast_to_tokens(per_sequence, batch.lengths, batch.response_mask))


def centred_group_advantages(batch: RaggedBatch, rewards: Tensor, algorithm: AlgorithmSection) -> Advantages:
    """Do the same without the standard deviation (``algorithm.advantage=dr_grpo``)."""
    del algorithm
    groups = required(batch.groups, "groups", "dr_grpo")
    per_sequence = compare(rewards, groups, partial(grpo, normalize_std=False))
    return Advantages(broadcast_to_tokens(per_sequence, batch.lengths, batch.response_mask))


def rloo(rewards: Tensor) -> Tensor:
    """Subtract from each reward the mean of its group's others (RLOO, arXiv:2402.14740, section 3.3).

    With G responses this is ``G / (G - 1)`` times the difference from the mean of all. A group of one has no other
    and gets 0, and so do groups whose rewards are all equal, exactly.

    Args:
        rewards: ``[P, G]``; NaN where a group has no further response.

    Returns:
        ``[P, G]``, same dtype; 0 where the reward is NaN.
    """
    count = (~rewards.isnan()).sum(dim=1, keepdim=True).to(rewards.dtype)
    return grpo(rewards, normalize_std=False) * (count / (count - 1).clamp(min=1))


def leave_one_out_advantages(batch: RaggedBatch, rewards: Tensor, algorithm: AlgorithmSection) -> Advantages:
    """Give every response token its response's difference (``algorithm.advantage=rloo``)."""
    del algorithm
    per_sequence = compare(rewards, required(batch.groups, "groups", "rloo"), rloo)
    return Advantages(broadcast_to_tokens(per_sequence, batch.lengths, batch.response_mask))


def no_advantages(batch: RaggedBatch, rewards: Tensor, algorithm: AlgorithmSection) -> Advantages:
    """Give every token the advantage 0 (``algorithm.advantage=none``)."""
    del rewards, algorithm
    return Advantages(torch.zeros(batch.num_tokens))
