"""The policy as a rollout engine: the trained modules generate, on the ranks that train them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from anytron.task.data.pretrained import load_tokenizer
from anytron.workers.engines.rollout_engine import Response
from anytron.workers.engines.sampling import RequestQueue, StopStrings, TokenDraws
from anytron_megatron.generation.cache import Cache, without_sequence_parallel
from anytron_megatron.training import parallel
from anytron_megatron.training.heads import TokenScoreHead

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from anytron.base.traits import ParallelSizes
    from anytron.config.schema import RunConfig
    from anytron.workers.engines.rollout_engine import GenerationRequest, StopReason
    from anytron_megatron.training.micro_batch import BatchPreparer
    from anytron_megatron.training.schedule import ModelChunk


class PolicyRollout:
    """Generates with the policy. All ranks get the same calls; each replica of the model makes its share of a batch.

    Nothing of it stays: modes, switches and the output layer are as they were, and no generator of random numbers is
    used, so that training goes on as if nothing had been generated.

    Args:
        chunks: The policy on this rank.
        preparer: Arranges sequences as padded rows (bshd).
        config: The run.
        sizes: The parallel sizes.
        vocab_size: Real entries of the vocabulary.
    """

    def __init__(
        self,
        chunks: Sequence[ModelChunk],
        preparer: BatchPreparer,
        config: RunConfig,
        sizes: ParallelSizes,
        *,
        vocab_size: int,
    ) -> None:
        rollout = config.rollout
        self._chunks, self._preparer, self._sizes, self._vocab_size = chunks, preparer, sizes, vocab_size
        self._max_batch_size = rollout.max_batch_size
        self._stop = StopStrings(rollout.stop, load_tokenizer(config.model)) if rollout.stop else None
        # Experts that are shared out over replicas take part in every forward pass of each.
        self._in_step = sizes.expert * sizes.expert_tensor > sizes.tensor
        self._queue = RequestQueue()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests."""
        self._queue.add(requests)

    def abort(self, ids: Sequence[int] | None) -> list[tuple[int, Response]]:
        """Give up requests; between two polls, none has begun."""
        given_up = self._queue.abort(ids)
        return given_up if parallel.topology().reports and parallel.topology().dp_rank == 0 else []

    def poll(self, version: int) -> list[tuple[int, Response]]:
        """Generate the next batch to its end, this replica its share; return that on the rank that reports."""
        place = parallel.topology()
        batch = self._queue.take(self._max_batch_size * place.dp_size)
        share = batch[place.dp_rank :: place.dp_size]
        with self._generating():
            responses = self._generate(share, version)
        return list(zip([request.id for request in share], responses, strict=True)) if place.reports else []

    @contextlib.contextmanager
    def _generating(self) -> Iterator[None]:
        """Let the model answer with logits, to steps of one token, without gradients and without dropout."""
        modules = [chunk.module for chunk in self._chunks]
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(without_sequence_parallel(modules))
            for chunk in self._chunks:
                if isinstance(chunk.head, TokenScoreHead):
                    stack.enter_context(chunk.head.answering_logits())
                stack.callback(chunk.module.train, chunk.module.training)
                chunk.module.eval()
            yield

    def _generate(self, requests: Sequence[GenerationRequest], version: int) -> list[Response]:
        responses: list[Response] = []
        if requests:
            rows = Rows(requests, self._stop if requests[0].sampling.stop else None)
            cache = self._new_cache(len(rows), rows.columns)
            draws = TokenDraws(requests[0].sampling, [request.seed for request in requests])
            self._begin(rows, cache)
            while not rows.ended:
                self._step(rows, cache, draws)
            responses = rows.responses(version)
        while self._any_goes_on(own=False):  # another replica needs this one's experts
            self._new_cache(1, 1).step(torch.zeros(1, dtype=torch.int64))
        return responses

    def _begin(self, rows: Rows, cache: Cache) -> None:
        """Feed what all prompts have at once."""
        beginnings = rows.beginnings()
        rows.column = beginnings.shape[1]
        if rows.column > 0:
            self._any_goes_on(own=True)
            cache.prefill(beginnings)

    def _step(self, rows: Rows, cache: Cache, draws: TokenDraws) -> None:
        """Feed one token of each row, draw the next ones on the rank that reports, and tell the replica's others.

        Those get zeros for log-probs.
        """
        self._any_goes_on(own=True)
        logits = cache.step(rows.next_tokens())
        rows.column += 1
        places = rows.places()
        tokens, log_probs = torch.zeros_like(places, device=self._preparer.device), torch.zeros(len(places))
        if parallel.topology().reports:
            assert logits is not None, "the rank is of the last pipeline stage"
            tokens, log_probs = draws(logits[:, : self._vocab_size], places)
        parallel.tell_replica(tokens)
        rows.take(tokens.tolist(), log_probs.tolist())

    def _any_goes_on(self, *, own: bool) -> bool:
        """Whether this replica does one more pass, or any other that shares experts with it. Asked before each."""
        return parallel.any_replica(own, self._preparer.device) if self._in_step else own

    def _new_cache(self, rows: int, columns: int) -> Cache:
        return Cache(self._chunks, self._preparer, pipeline=self._sizes.pipeline, rows=rows, columns=columns)


@dataclass
class Row:
    """One response in the making."""

    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    ended: StopReason | None = None

    def at(self, column: int) -> int:
        """The token of a column: the prompt's, or the response's; of a row that has ended, any."""
        place = column - len(self.prompt)
        if place < 0:
            return self.prompt[column]
        return self.tokens[min(place, len(self.tokens) - 1)]


class Rows:
    """A batch of requests that are sampled alike. All ranks of a replica keep the same rows.

    Args:
        requests: At least one.
        stop: Finds the stop strings; None = there are none.

    Attributes:
        column: How many tokens of each row have been fed.
    """

    def __init__(self, requests: Sequence[GenerationRequest], stop: StopStrings | None) -> None:
        self.column = 0
        self._rows = [Row(request.prompt.tokens) for request in requests]
        self._sampling, self._stop = requests[0].sampling, stop
        self._lengths = torch.tensor([len(row.prompt) for row in self._rows])

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def columns(self) -> int:
        """Tokens that are fed to a row at most: the last one of a response is not."""
        return int(self._lengths.max()) + self._sampling.max_new_tokens - 1

    @property
    def ended(self) -> bool:
        """Whether all responses have."""
        return all(row.ended for row in self._rows)

    def beginnings(self) -> Tensor:
        """Tokens that all prompts have but for the last one of the shortest: int64 ``[B, C']``, C' from 0."""
        shortest = int(self._lengths.min())
        return torch.tensor([row.prompt[: shortest - 1] for row in self._rows], dtype=torch.int64)

    def next_tokens(self) -> Tensor:
        """The tokens to feed: int64 ``[B]``."""
        return torch.tensor([row.at(self.column) for row in self._rows])

    def places(self) -> Tensor:
        """Place in its response of the token behind the fed one, int64 ``[B]``; negative within a prompt."""
        return self.column - self._lengths

    def take(self, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        """Add drawn tokens and their log-probs, B of each, to the rows whose prompts are over."""
        grown = []
        for row, place, token, log_prob in zip(self._rows, self.places().tolist(), tokens, log_probs, strict=True):
            if place >= 0 and not row.ended:
                row.tokens.append(token)
                row.log_probs.append(log_prob)
                grown.append(row)
        sampling = self._sampling
        may_stop = [row for row in grown if len(row.tokens) >= sampling.min_new_tokens]
        shown = self._shown(may_stop)
        for row, shows in zip(may_stop, shown, strict=True):
            if shows or row.tokens[-1] in sampling.end_token_ids:
                row.ended = "stop"
        for row in grown:
            if row.ended is None and len(row.tokens) == sampling.max_new_tokens:
                row.ended = "length"

    def responses(self, version: int) -> list[Response]:
        """Give the responses, all of which have ended."""
        found = []
        for row in self._rows:
            assert row.ended is not None, "asked for when all have ended"
            versions = (version,) * len(row.tokens)
            found.append(Response(tuple(row.tokens), tuple(row.log_probs), row.ended, versions))
        return found

    def _shown(self, rows: Sequence[Row]) -> list[bool]:
        stop = self._stop
        return [False] * len(rows) if stop is None else stop.shown([row.tokens[-stop.tail :] for row in rows])
