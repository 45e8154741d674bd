"""The policy as a rollout engine: the trained modules generate, on the ranks that train them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from anytron.task.data.pretrained import load_tokenizer
from anytron.workers.engines.sampling import RequestQueue, StopStrings, TokenDraws
from anytron_megatron.generation.cache import Cache, without_sequence_parallel
from anytron_megatron.generation.rows import Rows
from anytron_megatron.training import parallel
from anytron_megatron.training.heads import TokenScoreHead
from anytron_megatron.training.tracing import Tracer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from anytron.base.traits import ParallelSizes
    from anytron.config.schema import RunConfig
    from anytron.sequences.batch import RaggedBatch
    from anytron.workers.engines.rollout_engine import GenerationRequest, Response
    from anytron.workers.engines.tracing import Trace
    from anytron_megatron.training.micro_batch import BatchPreparer
    from anytron_megatron.training.schedule import ModelChunk


class PolicyRollout:
    """Generates with the policy. All ranks get the same calls; each replica generates its share of a batch.

    The reporting rank of a replica is the one whose :attr:`Topology.reports` is True.
    Generation has no effect on training: modes, switches and the output layer are restored, and no random generator is
    used.

    Args:
        chunks: The policy on this rank.
        preparer: Preparer that arranges sequences as padded rows (bshd).
        config: The run.
        sizes: The parallel sizes.
        vocab_size: Size of the vocabulary without padding.
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
        self._bitwise = config.engine.on_policy == "bitwise"
        # Experts that are shared out over replicas take part in every forward pass of each.
        self._in_step = sizes.expert * sizes.expert_tensor > sizes.tensor
        self._queue = RequestQueue()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests for the next polls."""
        self._queue.add(requests)

    def abort(self, ids: Sequence[int] | None) -> list[tuple[int, Response]]:
        """Abort queued requests, all if ``ids`` is None; no request is in progress between two polls.

        The reporting rank of replica 0 returns an empty response for each; other ranks return an empty list.
        """
        given_up = self._queue.abort(ids)
        return given_up if parallel.topology().reports and parallel.topology().dp_rank == 0 else []

    def poll(self, version: int) -> list[tuple[int, Response]]:
        """Generate the next batch to its end; each replica's reporting rank returns that replica's responses.

        ``version`` is the version of the weights, which the responses record.
        """
        place = parallel.topology()
        batch = self._queue.take(self._max_batch_size * place.dp_size)
        share = batch[place.dp_rank :: place.dp_size]
        with self._generating():
            responses = self._generate(share, version)
        return list(zip([request.id for request in share], responses, strict=True)) if place.reports else []

    def trace(self, batch: RaggedBatch, rows_of: tuple[str, str] | None) -> Trace:
        """Feed given sequences token by token, as if their responses were drawn, and trace every module.

        The arguments are as in :meth:`TraceableEngine.trace`; all replicas get the same sequences.
        """
        tracer = Tracer(self._chunks, [batch], rows_of)
        tokens = torch.nn.utils.rnn.pad_sequence(batch.tokens.split(batch.lengths.tolist()), batch_first=True)
        columns = tokens.shape[1] - 1
        prefilled = int((batch.lengths - batch.response_counts).min()) - 1
        if prefilled == -(-len(tokens) // self._sizes.pipeline):
            prefilled -= 1  # as many columns as rows: the tracer could not tell them apart
        log_probs = torch.zeros(tokens.shape)
        last = False
        with self._generating(), tracer.tracing_generation(prefilled):
            cache = self._new_cache(len(tokens), columns)
            if prefilled > 0:
                cache.prefill(tokens[:, :prefilled])
            for column in range(max(prefilled, 0), columns):
                logits = cache.step(tokens[:, column])
                drawn = tokens[:, column + 1].to(self._preparer.device)
                if logits is not None:
                    last = True
                    log_probs[:, column + 1] = self._log_probs(logits, drawn, batch.temperature).cpu()
        if last:
            inside = torch.arange(tokens.shape[1]) < batch.lengths[:, None]
            tracer.add_log_probs(log_probs[inside], batch.response_mask)
        return tracer.trace()

    def _by_the_kernel(self, drawn: Tensor, temperature: float) -> Tensor | None:
        """Log-probs of drawn tokens, float32 ``[B]``, by training's kernel on ranks of the last stage, if asked for."""
        head = self._chunks[-1].head
        return head.drawn(drawn, temperature) if self._bitwise and isinstance(head, TokenScoreHead) else None

    def _log_probs(self, logits: Tensor, drawn: Tensor, temperature: float) -> Tensor:
        if (scored := self._by_the_kernel(drawn, temperature)) is not None:
            return scored
        scores = torch.log_softmax(logits[:, : self._vocab_size] / temperature, dim=-1)  # as TokenDraws
        return scores.gather(-1, drawn[:, None])[:, 0]

    @contextlib.contextmanager
    def _generating(self) -> Iterator[None]:
        """In the ``with`` block, let the model return logits and take steps of one token; no gradients, no dropout."""
        modules = [chunk.module for chunk in self._chunks]
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(without_sequence_parallel(modules))
            for chunk in self._chunks:
                if isinstance(chunk.head, TokenScoreHead):
                    passes = self._sizes.pipeline if self._bitwise else 0
                    stack.enter_context(chunk.head.answering_logits(passes))
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
        """Feed the first tokens of all prompts in one pass, as many as the shortest prompt has minus 1."""
        beginnings = rows.beginnings()
        rows.column = beginnings.shape[1]
        if rows.column > 0:
            self._any_goes_on(own=True)
            cache.prefill(beginnings)

    def _step(self, rows: Rows, cache: Cache, draws: TokenDraws) -> None:
        """Feed one token of each row, draw the next tokens on the reporting rank, and broadcast them to its replica.

        The replica's other ranks record zeros as log-probs.
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
        if (scored := self._by_the_kernel(tokens, draws.temperature)) is not None:
            log_probs = scored
        rows.take(tokens.tolist(), log_probs.tolist())

    def _any_goes_on(self, *, own: bool) -> bool:
        """Whether this replica, or another one that shares experts with it, does one more pass. Asked before each."""
        return parallel.any_replica(own, self._preparer.device) if self._in_step else own

    def _new_cache(self, rows: int, columns: int) -> Cache:
        return Cache(self._chunks, self._preparer, pipeline=self._sizes.pipeline, rows=rows, columns=columns)
