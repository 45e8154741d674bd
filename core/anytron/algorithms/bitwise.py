"""The check of ``engine.on_policy=bitwise``: a token's log-prob must be the same number in rollout and training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anytron.base.errors import EngineError

if TYPE_CHECKING:
    from anytron.algorithms.contract import PolicyTokens
    from anytron.sequences.batch import RaggedBatch

SHOWN = 8
"""How many of a sequence's first tokens an error shows: enough to find its prompt."""


def require_equal(tokens: PolicyTokens, batch: RaggedBatch, config: str) -> Tensor:
    """Compare the log-probs of training, before the step's updates, with the rollout's. It waits for the device.

    Args:
        tokens: A micro-batch with ``rollout_log_probs``.
        batch: The same micro-batch, with ``token_shares``; tokens with a share of 0 are not compared.
        config: The run's configuration file, which the error names.

    Returns:
        float32 ``[T]``, 1 where the two differ: zeros.

    Raises:
        EngineError: The log-probs of a token differ, or one of them is NaN.
    """
    assert tokens.rollout_log_probs is not None
    assert batch.token_shares is not None
    compared = tokens.response_mask & (batch.token_shares > 0)
    differ = compared & ~(tokens.old_log_probs == tokens.rollout_log_probs)  # NaN equals nothing
    places = differ.nonzero()[:, 0]
    if places.numel() == 0:
        return differ.float()
    place = int(places[0])
    sequence = int(torch.searchsorted(torch.cumsum(batch.lengths, 0), place, right=True))
    start = int(batch.lengths[:sequence].sum())
    response = int(tokens.response_mask[start:place].sum())
    first = ", ".join(str(one) for one in batch.tokens[start : min(start + SHOWN, place)].tolist())
    raise EngineError(
        "A token's log-prob in training differs from the rollout's, and engine.on_policy is bitwise.",
        where=f"token {int(batch.tokens[place])}, number {response + 1} of its response, in a sequence that begins "
        f"with the tokens {first}",
        why=f"training computes {float(tokens.old_log_probs[place]):.9g}, the rollout computed "
        f"{float(tokens.rollout_log_probs[place]):.9g}; in this micro-batch {places.numel()} of {int(compared.sum())} "
        "tokens differ. Either a kernel gives other bits in other company, or the rollout had other weights",
        fix=f"find the first operation that differs with: anytron compare {config}; or set engine.on_policy=close to "
        "accept differences",
    )
