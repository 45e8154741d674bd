"""Sampling for engines that generate with their own loop, batch by batch.

This module queues requests, draws the next token of each row with a random number of the row's response, returns its
log-prob, and finds stop strings. A random number is a hash of the response's seed and the token's position, so that
there is no generator state that batches would share.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from anytron.workers.engines.rollout_engine import Response

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from anytron.workers.engines.rollout_engine import GenerationRequest, SamplingParams


class TokenDraws:
    """Draws tokens, each with the random number of its own response and position.

    Log-probs are the model's at the sampling temperature, before end tokens are suppressed and
    before top-k and top-p: exactly what a training engine computes for the same tokens. Only one ``[B, V]``
    distribution exists at a time.

    Args:
        sampling: Sampling parameters.
        seeds: Seed of each row, B numbers.
    """

    def __init__(self, sampling: SamplingParams, seeds: Sequence[int]) -> None:
        from transformers import TopKLogitsWarper, TopPLogitsWarper

        self._sampling = sampling
        self.temperature = sampling.temperature
        self._seeds = seeds
        self._warpers: list[Any] = []
        if sampling.top_k > 0:
            self._warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            self._warpers.append(TopPLogitsWarper(sampling.top_p))

    def __call__(self, logits: Tensor, positions: int | Tensor) -> tuple[Tensor, Tensor]:
        """Draw the next token of each row.

        Args:
            logits: float32 ``[B, V]``.
            positions: Positions of the drawn tokens in their responses, from 0: one number for all rows, or int64
                ``[B]`` on the host.

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


def uniform_numbers(seeds: Sequence[int], position: int | Tensor) -> Tensor:
    """Return a random number for each row: output ``position`` of the SplitMix64 generator with the row's seed.

    G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators" (2014); the constants are those of
    java.util.SplittableRandom. Computed on the host, so that all devices draw the same.

    Args:
        seeds: B numbers in ``[0, 2**63)``.
        position: Position of the token in the response, from 0: one for all rows, or int64 ``[B]`` on the host.

    Returns:
        float32 ``[B]`` on the host, multiples of ``2**-24`` in ``[0, 1)``.
    """
    state = torch.tensor(seeds, dtype=torch.int64) + (torch.as_tensor(position) + 1) * _signed(0x9E3779B97F4A7C15)
    state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
    state = state ^ _shifted(state, 31)
    return _shifted(state, 40).float() * 2.0**-24


def _signed(value: int) -> int:
    """Return the int64 with the same 64 bits: torch multiplies int64 modulo 2**64, and hardly supports uint64."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shift to the right and fill with zeros."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def draw(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Draw a token for each row by inverting its distribution function.

    Args:
        log_probs: float32 ``[B, V]``, -inf for a token that may not be drawn; their exponentials need not add up to 1.
        uniform: float32 ``[B]`` in ``[0, 1)``, on the same device.

    Returns:
        int64 ``[B]``.
    """
    probabilities = torch.softmax(log_probs, dim=-1)
    below = probabilities.cumsum(-1)
    # The total may differ from 1 by rounding; uniform * total is less than it, also after rounding.
    reached = below > uniform[:, None] * below[:, -1:]
    # A parallel sum need not be monotonic to the last digit: what has no probability is never drawn.
    return (reached & (probabilities > 0)).int().argmax(-1)


STRIPPED_TOKENS = 2
"""Tokens decoded in addition, before the longest stop string: SentencePiece decoders strip a leading space."""


class StopStrings:
    """Finds stop strings in the last tokens of a response.

    It searches the decoded tail of a response. (transformers' ``StopStringCriteria`` derives a table from the
    vocabulary instead, and fails on tokenizers that cannot encode the letters a to f.)

    Args:
        strings: The stop strings, at least one.
        tokenizer: A Hugging Face tokenizer.

    Attributes:
        tail: Number of last tokens of a response that must be passed to :meth:`shown`.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        self._strings = strings
        self._tokenizer = tokenizer
        # A token is at least a byte of text; some decoders strip the first characters.
        self.tail = max(len(stop.encode()) for stop in strings) + STRIPPED_TOKENS

    def shown(self, tails: list[list[int]]) -> list[bool]:
        """Return for each tail whether it contains a stop string."""
        texts = self._tokenizer.batch_decode(tails)
        return [any(stop in text for stop in self._strings) for text in texts]


class RequestQueue:
    """A queue with the longest prompts in front, so that a batch holds prompts of similar lengths."""

    def __init__(self) -> None:
        self._requests: list[GenerationRequest] = []

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests."""
        self._requests.extend(requests)
        self._requests.sort(key=lambda request: -len(request.prompt.tokens))

    def take(self, count: int, *, same_length: bool = False) -> list[GenerationRequest]:
        """Take the next batch: at most ``count`` requests, all with equal sampling parameters; empty if none wait.

        With ``same_length``, their prompts have equally many tokens.
        """
        if not self._requests:
            return []
        sampling, length = self._requests[0].sampling, len(self._requests[0].prompt.tokens)
        alike = [request for request in self._requests if request.sampling == sampling]
        batch = [request for request in alike if not same_length or len(request.prompt.tokens) == length][:count]
        taken = {request.id for request in batch}
        self._requests = [request for request in self._requests if request.id not in taken]
        return batch

    def abort(self, ids: Sequence[int] | None = None) -> list[tuple[int, Response]]:
        """Cancel requests (None = all); return empty responses for them."""
        given_up = [request.id for request in self._requests if ids is None or request.id in ids]
        self._requests = [request for request in self._requests if request.id not in given_up]
        return [(one, Response((), (), "abort", ())) for one in given_up]
