"""Sample tokens inside ``transformers.generate`` and keep their log-probs.

Legend: B rows, V vocabulary, W generated columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria, TopKLogitsWarper, TopPLogitsWarper

from anytron.engines.protocol import Response, SamplingParams, StopReason
from anytron_rollout.draws import draw, uniform_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

STRIPPED_TOKENS = 2
"""Tokens decoded before the longest stop string: SentencePiece decoders strip a leading space."""


class TokenSampler(LogitsProcessor):
    """Draw each row's next token with its own random number, and keep the log-probs of the drawn tokens.

    Log-probs are those of the model at the sampling temperature, before end tokens are suppressed and
    before top-k and top-p: exactly what a training engine computes for the same tokens. Only one ``[B, V]``
    tensor exists at a time (``output_logits=True`` would keep W of them).

    Args:
        sampling: How to sample.
        seeds: Each row's seed, B of them.
        prompt_width: Columns of the prompt.
        tokenizer: The tokenizer; only stop strings need one.
    """

    def __init__(self, sampling: SamplingParams, seeds: Sequence[int], *, prompt_width: int, tokenizer: Any) -> None:
        self.stopping = _Stopping(sampling, prompt_width, tokenizer)
        self._prompt_width = prompt_width
        self._sampling = sampling
        self._seeds = seeds
        self._warpers: list[LogitsProcessor] = []
        if sampling.top_k > 0:
            self._warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            self._warpers.append(TopPLogitsWarper(sampling.top_p))
        self._log_probs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Draw the next tokens.

        Args:
            input_ids: int64 ``[B, prompt_width + tokens so far]``.
            scores: float32 ``[B, V]`` logits.

        Returns:
            float32 ``[B, V]``: 0 for the token that was drawn, -inf for all others. ``generate`` takes the largest.
        """
        sampling, position = self._sampling, input_ids.shape[1] - self._prompt_width
        distribution = torch.log_softmax(scores / sampling.temperature, dim=-1)
        allowed = distribution
        if sampling.end_token_ids and position < sampling.min_new_tokens:
            allowed = allowed.clone()
            allowed[:, list(sampling.end_token_ids)] = -torch.inf
        for warper in self._warpers:
            allowed = warper(input_ids, allowed)
        drawn = draw(allowed, uniform_numbers(self._seeds, position).to(scores.device))[:, None]
        self._log_probs.append(distribution.gather(-1, drawn)[:, 0])
        return torch.full_like(scores, -torch.inf).scatter_(-1, drawn, 0.0)

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

    It looks for stop strings in the decoded tail of each response. (transformers' ``StopStringCriteria`` derives a
    table from the vocabulary instead, and fails on tokenizers that do not know its letters.)
    """

    def __init__(self, sampling: SamplingParams, prompt_width: int, tokenizer: Any) -> None:
        self.ends: Tensor = torch.empty(0)
        self._prompt_width = prompt_width
        self._minimum = sampling.min_new_tokens
        self._end_tokens = torch.tensor(sampling.end_token_ids, dtype=torch.int64)
        self._stop = sampling.stop
        self._tokenizer = tokenizer
        # A token is at least a byte of text; some decoders strip the first characters.
        self._tail = max((len(stop.encode()) for stop in sampling.stop), default=0) + STRIPPED_TOKENS

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:  # noqa: ARG002 - a fixed signature
        """Look at the drawn tokens, int64 ``input_ids[:, -1]``; return bool ``[B]``, True = ended."""
        drawn = input_ids[:, -1]
        count = input_ids.shape[1] - self._prompt_width
        if count == 1:
            self._end_tokens = self._end_tokens.to(drawn.device)
            self.ends = torch.zeros_like(drawn)
        if count >= self._minimum:
            ended = torch.isin(drawn, self._end_tokens)
            if self._stop:
                ended |= self._shows_stop(input_ids[:, max(self._prompt_width, input_ids.shape[1] - self._tail) :])
            self.ends = torch.where((self.ends == 0) & ended, count, self.ends)
        return self.ends > 0

    def _shows_stop(self, tails: Tensor) -> Tensor:
        texts = self._tokenizer.batch_decode(tails.tolist())
        found = [any(stop in text for stop in self._stop) for text in texts]
        return torch.tensor(found, device=tails.device)
