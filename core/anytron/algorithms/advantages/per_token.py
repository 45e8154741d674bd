"""Bring values of sequences to their tokens, and give the tokens of a step a common scale."""

from __future__ import annotations

import torch
from torch import Tensor

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
