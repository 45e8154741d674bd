"""Decide how much each token weighs in the loss of one optimizer update."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from anytron.base.errors import DataError

Aggregation = Literal["token-mean", "sequence-mean", "token-sum", "length-constant"]


def loss_weights(lengths: Tensor, response_mask: Tensor, aggregation: Aggregation, length: int = 1) -> Tensor:
    """Compute the token weights of one mini-batch that turn the sum of token losses into the selected mean or sum.

    The weights are known before the mini-batch is split, so the loss and its gradient do not depend
    on the number of micro-batches or ranks: each computes its part of one sum. (In an average of
    per-micro-batch averages, the weight of a token would depend on the size of its micro-batch.)

    ===================  ==============================  ======================================================
    ``token-mean``       ``1 / tokens``                  all response tokens alike (DAPO, arXiv:2503.14476, eq. 8)
    ``sequence-mean``    ``1 / (responses * own)``       all responses alike, and the ``own`` tokens of a response alike
                                                         (GRPO, arXiv:2402.03300, eq. 3); without empty responses
    ``token-sum``        ``1``                           the sum
    ``length-constant``  ``1 / (sequences * length)``    the mean over sequences of sum / ``length`` (Dr. GRPO,
                                                         arXiv:2503.20783, appendix A): long responses weigh more
    ===================  ==============================  ======================================================

    Args:
        lengths: int64 ``[B]``, tokens of each sequence, prompt included.
        response_mask: bool ``[T]``, True = the token was generated.
        aggregation: One of the names above.
        length: The constant of ``length-constant``, in tokens.

    Returns:
        float32 ``[T]``, 0 outside of responses; for ``token-mean`` and ``sequence-mean``, they add up to 1.

    Raises:
        DataError: No sequence has a response.
    """
    total = int(response_mask.sum())
    if total == 0:
        raise DataError(
            "Nothing to learn from: every response of the mini-batch is empty.",
            where="loss_weights",
            why=f"none of its {lengths.numel()} sequences has a generated token",
            fix="check rollout.stop and the model's end token; rollout.min_new_tokens=1 forces a first token",
        )
    if aggregation == "token-mean":
        return response_mask.float() / total
    if aggregation == "token-sum":
        return response_mask.float()
    if aggregation == "length-constant":
        return response_mask.float() / (lengths.numel() * length)
    sequence = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    per_sequence = torch.zeros_like(lengths).index_add_(0, sequence, response_mask.to(lengths.dtype))
    non_empty = int((per_sequence > 0).sum())
    share = 1.0 / (per_sequence.clamp(min=1) * non_empty).float()
    return share[sequence] * response_mask


def token_shares(response_mask: Tensor) -> Tensor:
    """Compute equal weights for the response tokens of a mini-batch, for metrics.

    Args:
        response_mask: bool ``[T]``.

    Returns:
        float32 ``[T]``, 0 outside of responses, adding up to 1 if there is any response token.
    """
    return response_mask.float() / response_mask.sum().clamp(min=1)
