"""Draw the next token of each row of a batch, and give its log-prob: for engines that sample by themselves.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from anytron.workers.engines.draws import draw, uniform_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from anytron.workers.engines.rollout_engine import SamplingParams


class TokenDraws:
    """Draws tokens, each with the random number of its own response and position.

    Log-probs are those of the model at the sampling temperature, before end tokens are suppressed and
    before top-k and top-p: exactly what a training engine computes for the same tokens. Only one ``[B, V]``
    distribution exists at a time.

    Args:
        sampling: How to sample.
        seeds: Each row's seed, B of them.
    """

    def __init__(self, sampling: SamplingParams, seeds: Sequence[int]) -> None:
        from transformers import TopKLogitsWarper, TopPLogitsWarper

        self._sampling = sampling
        self._seeds = seeds
        self._warpers: list[Any] = []
        if sampling.top_k > 0:
            self._warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            self._warpers.append(TopPLogitsWarper(sampling.top_p))

    def __call__(self, logits: Tensor, positions: int | Tensor) -> tuple[Tensor, Tensor]:
        """Draw.

        Args:
            logits: float32 ``[B, V]``.
            positions: Of the drawn tokens in their responses, from 0; of all rows, or int64 ``[B]`` on the host.

        Returns:
            Tokens int64 ``[B]`` and their log-probs float32 ``[B]``.
        """
        sampling = self._sampling
        distribution = torch.log_softmax(logits / sampling.temperature, dim=-1)
        allowed = distribution
        early = torch.as_tensor(positions) < sampling.min_new_tokens
        if sampling.end_token_ids and bool(early.any()):
            ends = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
            ends[list(sampling.end_token_ids)] = True
            allowed = allowed.masked_fill(early.to(logits.device).view(-1, 1) & ends, -torch.inf)
        for warper in self._warpers:
            allowed = warper(None, allowed)
        tokens = draw(allowed, uniform_numbers(self._seeds, positions).to(logits.device))
        return tokens, distribution.gather(-1, tokens[:, None])[:, 0]
