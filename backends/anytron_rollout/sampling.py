"""Sample tokens inside ``transformers.generate`` and keep their log-probs.

Legend: B rows, V vocabulary, W generated columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

from anytron.workers.engines.rollout_engine import Response, SamplingParams, StopReason
from anytron.workers.engines.sampling import TokenDraws

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.workers.engines.sampling import StopStrings


class TokenSampler(LogitsProcessor):
    """Draw each row's next token (``anytron.workers.engines.sampling.TokenDraws``), and keep the tokens' log-probs.

    Only one ``[B, V]`` tensor exists at a time (``output_logits=True`` would keep W of them).

    Args:
        sampling: How to sample.
        seeds: Each row's seed, B of them.
        prompt_width: Columns of the prompt.
        stop: Finds the stop strings of ``sampling``; None = there are none.
    """

    def __init__(
        self, sampling: SamplingParams, seeds: Sequence[int], *, prompt_width: int, stop: StopStrings | None
    ) -> None:
        self.stopping = _Stopping(sampling, prompt_width, stop)
        self._prompt_width = prompt_width
        self._draws = TokenDraws(sampling, seeds)
        self._log_probs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Draw the next tokens.

        Args:
            input_ids: int64 ``[B, prompt_width + tokens so far]``.
            scores: float32 ``[B, V]`` logits.

        Returns:
            float32 ``[B, V]``: 0 for the token that was drawn, -inf for all others. ``generate`` takes the largest.
        """
        drawn, log_probs = self._draws(scores, input_ids.shape[1] - self._prompt_width)
        self._log_probs.append(log_probs)
        return torch.full_like(scores, -torch.inf).scatter_(-1, drawn[:, None], 0.0)

    def responses(self, sequences: Tensor, version: int) -> list[Response]:
        """Cut each row at its end.

        Args:
            sequences: int64 ``[B, prompt_width + W]``, as ``generate`` returns them; tokens after a row's end
                mean nothing.
            version: Of the weights.
        """
        tokens = sequences[:, self._prompt_width :].tolist()
        log_probs = torch.stack(self._log_probs, dim=1).tolist()
        responses = []
        for row, values, end in zip(tokens, log_probs, self.stopping.ends.tolist(), strict=True):
            length = end or len(row)
            reason: StopReason = "stop" if end else "length"
            responses.append(Response(tuple(row[:length]), tuple(values[:length]), reason, (version,) * length))
        return responses


class _Stopping(StoppingCriteria):
    """Tell which rows have ended, and keep after how many tokens each did.

    The count is needed because tokens after an end look like any others.
    """

    def __init__(self, sampling: SamplingParams, prompt_width: int, stop: StopStrings | None) -> None:
        self.ends: Tensor = torch.empty(0)
        self._prompt_width = prompt_width
        self._minimum = sampling.min_new_tokens
        self._end_tokens = torch.tensor(sampling.end_token_ids, dtype=torch.int64)
        self._stop = stop

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:  # noqa: ARG002 - a fixed signature
        """Look at the drawn tokens, int64 ``input_ids[:, -1]``; return bool ``[B]``, True = ended."""
        drawn = input_ids[:, -1]
        count = input_ids.shape[1] - self._prompt_width
        if count == 1:
            self._end_tokens = self._end_tokens.to(drawn.device)
            self.ends = torch.zeros_like(drawn)
        if count >= self._minimum:
            ended = torch.isin(drawn, self._end_tokens)
            if self._stop is not None:
                tails = input_ids[:, max(self._prompt_width, input_ids.shape[1] - self._stop.tail) :]
                ended |= torch.tensor(self._stop.shown(tails.tolist()), device=drawn.device)
            self.ends = torch.where((self.ends == 0) & ended, count, self.ends)
        return self.ends > 0
