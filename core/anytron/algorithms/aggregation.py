"""Decide how much each token weighs in the loss of one optimizer update."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from anytron.base.errors import DataError

Aggregation = Literal["token-mean", "sequence-mean", "token-sum", "length-constant"]


def loss_weights(counts: Tensor, aggregation: Aggregation, length: int = 1, responses: Tensor | None = None) -> Tensor:
    """Compute the token weights of one mini-batch that turn the sum of token losses into the selected mean or sum.

    The weights are known before the mini-batch is split, so the loss and its gradient do not depend
    on the number of micro-batches or ranks: each computes its part of one sum. (In an average of
    per-micro-batch averages, the weight of a token would depend on the size of its micro-batch.)

    ===================  ==============================  ======================================================
    ``token-mean``       ``1 / tokens``                  all response tokens alike (DAPO, arXiv:2503.14476, eq. 8)
    ``sequence-mean``    ``1 / (responses * own)``       all responses alike, and the ``own`` tokens of a response alike
                                                         (GRPO, arXiv:2402.03300, eq. 3); without empty responses
    ``token-sum``        ``1``                           the sum
    ``length-constant``  ``1 / (responses * length)``    the mean over responses of sum / ``length`` (Dr. GRPO,
                                                         arXiv:2503.20783, appendix A): long responses weigh more
    ===================  ==============================  ======================================================

    A response of several sequences, the conversations of one agent, has the weight of a response of one: ``own`` are
    the tokens of all its sequences.

    Args:
        counts: int64 ``[B]``, generated tokens of each sequence.
        aggregation: One of the names above.
        length: The constant of ``length-constant``, in tokens.
        responses: int64 ``[B]``, number of the response of each sequence; sequences of a response are adjacent. None =
            each sequence is a response.

    Returns:
        float32 ``[B]``, the weight of each generated token of a sequence; other tokens have a weight of 0. For
        ``token-mean`` and ``sequence-mean``, the weights of all tokens add up to 1.

    Raises:
        DataError: No sequence has a response.
    """
    total = int(counts.sum())
    if total == 0:
        raise DataError(
            "Nothing to learn from: every response of the mini-batch is empty.",
            where="loss_weights",
            why=f"none of its {counts.numel()} sequences has a generated token",
            fix="check rollout.stop and the model's end token; rollout.min_new_tokens=1 forces a first token",
        )
    if responses is not None:
        _, place, sizes = torch.unique_consecutive(responses, return_inverse=True, return_counts=True)
        whole = counts.new_zeros(sizes.numel()).index_add_(0, place, counts)
        return loss_weights(whole, aggregation, length)[place]
    each = torch.ones(counts.numel())
    if aggregation == "token-mean":
        return each / total
    if aggregation == "token-sum":
        return each
    if aggregation == "length-constant":
        return each / (counts.numel() * length)
    non_empty = int((counts > 0).sum())
    return 1.0 / (counts.clamp(min=1) * non_empty).float()


def token_share(counts: Tensor) -> Tensor:
    """Compute the equal weight of each response token of a mini-batch, for metrics.

    Args:
        counts: int64 ``[B]``, generated tokens of each sequence.

    Returns:
        float32 scalar; the weights of all response tokens add up to 1, if there is any.
    """
    return 1.0 / counts.sum().clamp(min=1).float()
