"""``anytron compare``: find the first operation whose bits depend on how a token is computed.

Responses to the run's prompts are sampled, and the training ranks compute the same tokens in several ways. Each rank
returns digests of what its modules computed for each token (:mod:`anytron.workers.engines.tracing`), which are
compared here. Where they differ first, the numbers are asked for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from anytron.base.results import Result
from anytron.proof.checks import Check, Inapplicable, Report, make
from anytron.proof.verification.engines import draw_prompts, plan_of, sample_trajectories
from anytron.run.preflight.capabilities import generates_in_training
from anytron.run.preflight.prepare import prepare
from anytron.run.trainer.models import write_random_model
from anytron.run.trainer.weight_transfer import WeightsInPlace, WeightTransfer
from anytron.run.trainer.workers import TrainingWorkers, kernel_suppliers, start_workers
from anytron.workers.engines.tracing import LOG_PROB, TraceableEngine
from anytron.workers.executor.protocol import call

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from anytron.config.schema import RunConfig
    from anytron.proof.checks import Watcher
    from anytron.sequences.batch import RaggedBatch
    from anytron.workers.engines.tracing import Trace, TracedTensor, Way
    from anytron.workers.executor.protocol import Executor

EQUAL = "equal to the bit"


def compare(config: RunConfig, executor: Executor, exchange: Path, watcher: Watcher) -> Report:
    """Make all comparisons of ``anytron compare``.

    Args:
        config: Configuration, complete and checked; files of the run go into its ``trainer.output_dir``.
        executor: Starts the engines; the caller closes it.
        exchange: A private directory for weights.
        watcher: Receives the progress and each result.

    Returns:
        One result for each of :data:`CHECKS`. A difference is a failure if ``engine.on_policy`` is ``bitwise``, else a
        warning. Facts: the suppliers of the kernels, the mode and the numbers of sequences and tokens.

    Raises:
        AnytronError: The prompts are not usable, or an engine fails.
    """
    watcher.begins("starting the engines")
    prepared = prepare(config)
    write_random_model(config, prepared.tokenizer)
    trainer, rollout, _ = start_workers(executor, config)
    own = generates_in_training(config)
    transfer = WeightsInPlace() if own else WeightTransfer.from_config(config, executor, exchange, lambda _: None)
    rollout.load_weights(transfer.of(trainer, compared=False))
    watcher.begins("sampling responses")
    batch = sample_trajectories(config, prepared, rollout, draw_prompts(config, prepared)).batch
    subject = _Subject(config, trainer, batch)
    results = [*make(CHECKS, lambda check: check.results(subject, check.name), watcher)]
    facts = {
        "kernels": kernel_suppliers(trainer.describe()),
        "on_policy": config.engine.on_policy,
        "sequences": batch.num_sequences,
        "tokens": batch.num_tokens,
    }
    return Report(results, facts)


@dataclass(frozen=True)
class Difference:
    """The first tensor, in the order of computation, that differs between two passes.

    Attributes:
        tensor: The tensor.
        rank: The training rank that computed it.
        token: Number of the first token whose row differs.
        tokens: How many tokens have rows that differ.
        tensors: How many tensors differ.
    """

    tensor: TracedTensor
    rank: int
    token: int
    tokens: int
    tensors: int


class _Subject:
    def __init__(self, config: RunConfig, trainer: TrainingWorkers, batch: RaggedBatch) -> None:
        self._config, self._trainer, self._batch = config, trainer, batch
        self._together = self._traces("training", [batch])

    def _traces(self, way: Way, batches: Sequence[RaggedBatch], rows_of: tuple[str, str] | None = None) -> list[Trace]:
        return call(self._trainer.group, TraceableEngine.trace, batches, way, rows_of)

    def rollout_against_training(self, name: str) -> Result:
        """Compare the log-probs with which the responses were drawn with those of a scoring pass of the run."""
        batch = self._batch
        assert batch.rollout_log_probs is not None
        scored = self._trainer.score(batch, plan_of(self._trainer, self._config), "policy")
        differ = batch.response_mask & ~(scored == batch.rollout_log_probs)
        count, of = int(differ.sum()), int(batch.response_mask.sum())
        if not count:
            return Result(name, "passed", f"{EQUAL}: the log-probs of {of} sampled tokens")
        token = int(differ.nonzero()[0, 0])
        return self._apart(
            name,
            f"log-prob of {place_of(batch, token)}: {float(batch.rollout_log_probs[token]):.9g} in the rollout, "
            f"{float(scored[token]):.9g} in training; {count} of {of} sampled tokens differ",
            float((scored - batch.rollout_log_probs)[differ].abs().max()),
            {"token": str(token)},
        )

    def alone_against_together(self, name: str) -> Result:
        """Compare each sequence alone with all sequences together."""
        alone = [self._batch.select(torch.tensor([number])) for number in range(self._batch.num_sequences)]
        return self._compared(name, "alone", "together", "training", alone)

    def generation_against_training(self, name: str) -> Result:
        """Compare generation on the training ranks with all sequences together."""
        if not generates_in_training(self._config):
            engine = self._config.rollout.engine
            raise Inapplicable(f"the engine {engine} has its own model, whose modules are not traced")
        return self._compared(name, "generation", "training", "generation", [self._batch])

    def _compared(self, name: str, one: str, other: str, way: Way, batches: Sequence[RaggedBatch]) -> Result:
        """Compare a pass with the pass over all sequences together; ``one`` and ``other`` say what they are called."""
        found = self._traces(way, batches)
        modules = {tensor.name for trace in found for tensor in trace.tensors} - {LOG_PROB}
        both = {tensor.name for trace in self._together for tensor in trace.tensors} & modules
        difference = first_difference(found, self._together)
        if difference is None:
            what = f"{self._batch.num_tokens} tokens, {len(both)} modules and the log-probs"
            return Result(name, "passed", f"{EQUAL}: {what}")
        key, token = difference.tensor.key, difference.token
        rows = [
            traces[difference.rank].rows
            for traces in (self._traces(way, batches, key), self._traces("training", [self._batch], key))
        ]
        mine, theirs = (row[token] for row in rows if row is not None)
        entry = int((mine != theirs).nonzero()[0, 0])
        ranks = f" on rank {difference.rank}" if self._trainer.group.size > 1 else ""
        return self._apart(
            name,
            f"first in {title(*key)}{ranks}, at {place_of(self._batch, token)}: {float(mine[entry]):.9g} {one}, "
            f"{float(theirs[entry]):.9g} {other} (entry {entry} of {mine.numel()}); there {difference.tokens} tokens "
            f"differ, and {difference.tensors} tensors in all",
            float((mine - theirs).abs().max()),
            {"module": key[0], "tensor": key[1], "token": str(token), "entry": str(entry)},
        )

    def _apart(self, name: str, detail: str, difference: float, notes: Mapping[str, str]) -> Result:
        bitwise = self._config.engine.on_policy == "bitwise"
        fix = (
            "look at the kernel of that module: its rows must not depend on other rows; or set engine.on_policy=close"
            if bitwise
            else "nothing is wrong: engine.on_policy=close allows differences; set it to bitwise to have none"
        )
        return Result(
            name, "failed" if bitwise else "warning", detail, fix, difference=difference, tolerance=0.0, notes=notes
        )


CHECKS = (
    Check("rollout-against-training", _Subject.rollout_against_training),
    Check("alone-against-together", _Subject.alone_against_together),
    Check("generation-against-training", _Subject.generation_against_training),
)
"""The comparisons, in the order of the report."""


def first_difference(found: Sequence[Trace], expected: Sequence[Trace]) -> Difference | None:
    """Find the first tensor, in the order of computation, with a token that differs; None if all bits are equal.

    Tensors and tokens that only one pass computed are left out, and tensors of two widths: latent attention takes the
    latents themselves when it generates.

    Args:
        found: Traces of a pass, by rank.
        expected: Traces of another pass over the same tokens, by rank; they say the order.
    """
    differing: list[tuple[int, int, int, Tensor, TracedTensor]] = []
    for rank, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        known = {tensor.key: tensor for tensor in mine.tensors}
        for order, tensor in enumerate(theirs.tensors):
            own = known.get(tensor.key)
            if own is None or own.width != tensor.width:
                continue
            differ = own.computed & tensor.computed & (own.digests != tensor.digests)
            if bool(differ.any()):
                differing.append((tensor.stage, order, rank, differ, tensor))
    if not differing:
        return None
    _, _, rank, differ, tensor = min(differing, key=lambda one: one[:3])
    return Difference(
        tensor,
        rank,
        token=int(differ.nonzero()[0, 0]),
        tokens=int(differ.sum()),
        tensors=len({one[-1].key for one in differing}),
    )


def title(name: str, kind: str) -> str:
    """Return how a tensor is called in a report: with its layer, if it belongs to one."""
    if name == LOG_PROB:
        return "the log-probs (the output layer)"
    layer = re.search(r"(?:^|\.)layers\.(\d+)", name)
    return (f"layer {layer[1]}: " if layer else "") + f"{kind} of {name}"


def place_of(batch: RaggedBatch, token: int) -> str:
    """Return the id of a flat token, its place in its sequence, and its place in the response if it is there.

    Sequences and places are counted from 1.
    """
    sequence = int(torch.searchsorted(torch.cumsum(batch.lengths, 0), token, right=True))
    start = int(batch.lengths[:sequence].sum())
    inside = int(batch.response_mask[start : token + 1].sum())
    part = f"number {inside} of the response" if bool(batch.response_mask[token]) else "in the prompt"
    return f"token {int(batch.tokens[token])} ({part}; number {token - start + 1} of sequence {sequence + 1})"
