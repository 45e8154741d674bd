"""Sample tokens inside ``transformers.generate`` and keep their log-probs.

Legend: B rows, V vocabulary, W generated columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria, TopKLogitsWarper, TopPLogitsWarper

from anytron.engines.protocol import Response, SamplingParams

STRIPPED_TOKENS = 2
"""Tokens decoded before the longest stop string: SentencePiece decoders strip a leading space."""


class TokenSampler(LogitsProcessor):
    """Turn logits into the distribution to sample from, and keep the log-probs of the drawn tokens.

    Log-probs are those of the model at the sampling temperature, before end tokens are suppressed and
    before top-k and top-p: exactly what a training engine computes for the same tokens. Only one ``[B, V]``
    tensor exists at a time (``output_logits=True`` would keep W of them).

    Args:
        sampling: How to sample.
        prompt_width: Columns of the prompt.
        tokenizer: The tokenizer; only stop strings need one.
    """

    def __init__(self, sampling: SamplingParams, *, prompt_width: int, tokenizer: Any) -> None:
        self.stopping = _Stopping(self, sampling, tokenizer)
        self.prompt_width = prompt_width
        self._sampling = sampling
        self._warpers: list[LogitsProcessor] = []
        if sampling.top_k > 0:
            self._warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            self._warpers.append(TopPLogitsWarper(sampling.top_p))
        self._distribution: Tensor | None = None
        self._log_probs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Compute the distribution of the next draw.

        Args:
            input_ids: int64 ``[B, prompt_width + tokens so far]``.
            scores: float32 ``[B, V]`` logits.

        Returns:
            float32 ``[B, V]``; the next tokens are drawn from its softmax.
        """
        sampling = self._sampling
        self._distribution = torch.log_softmax(scores / sampling.temperature, dim=-1)
        allowed = self._distribution
        if sampling.end_token_ids and input_ids.shape[1] - self.prompt_width < sampling.min_new_tokens:
            allowed = allowed.clone()
            allowed[:, list(sampling.end_token_ids)] = -torch.inf
        for warper in self._warpers:
            allowed = warper(input_ids, allowed)
        return allowed

    def record(self, drawn: Tensor) -> None:
        """Keep the log-probs of the tokens just drawn, int64 ``[B]``."""
        assert self._distribution is not None
        self._log_probs.append(self._distribution.gather(-1, drawn[:, None])[:, 0])
        self._distribution = None

    def responses(self, sequences: Tensor) -> list[Response]:
        """Cut each row at its end.

        Args:
            sequences: int64 ``[B, prompt_width + W]``, as ``generate`` returns them; tokens after a row's end
                mean nothing.
        """
        tokens = sequences[:, self.prompt_width :].tolist()
        log_probs = torch.stack(self._log_probs, dim=1).tolist()
        return [
            Response(tokens=tuple(row[: end or len(row)]), log_probs=tuple(values[: end or len(row)]), finished=end > 0)
            for row, values, end in zip(tokens, log_probs, self.stopping.ends.tolist(), strict=True)
        ]


class _Stopping(StoppingCriteria):
    """Tell which rows have ended, and keep after how many tokens each did.

    The count is needed because tokens after an end look like any others.

    It looks for stop strings in the decoded tail of each response. (transformers' ``StopStringCriteria`` derives a
    table from the vocabulary instead, and fails on tokenizers that do not know its letters.)
    """

    def __init__(self, sampler: TokenSampler, sampling: SamplingParams, tokenizer: Any) -> None:
        self.ends: Tensor = torch.empty(0)
        self._sampler = sampler
        self._minimum = sampling.min_new_tokens
        self._end_tokens = torch.tensor(sampling.end_token_ids, dtype=torch.int64)
        self._stop = sampling.stop
        self._tokenizer = tokenizer
        # A token is at least a byte of text; some decoders strip the first characters.
        self._tail = max((len(stop.encode()) for stop in sampling.stop), default=0) + STRIPPED_TOKENS

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:  # noqa: ARG002 - a fixed signature
        """Record the drawn tokens, int64 ``input_ids[:, -1]``; return bool ``[B]``, True = ended."""
        drawn = input_ids[:, -1]
        self._sampler.record(drawn)
        count = input_ids.shape[1] - self._sampler.prompt_width
        if count == 1:
            self._end_tokens = self._end_tokens.to(drawn.device)
            self.ends = torch.zeros_like(drawn)
        if count >= self._minimum:
            ended = torch.isin(drawn, self._end_tokens)
            if self._stop:
                ended |= self._shows_stop(
                    input_ids[:, max(self._sampler.prompt_width, input_ids.shape[1] - self._tail) :]
                )
            self.ends = torch.where((self.ends == 0) & ended, count, self.ends)
        return self.ends > 0

    def _shows_stop(self, tails: Tensor) -> Tensor:
        texts = self._tokenizer.batch_decode(tails.tolist())
        found = [any(stop in text for stop in self._stop) for text in texts]
        return torch.tensor(found, device=tails.device)
