"""Run micro-batches through Megatron's pipeline schedules: from ragged batches to outputs, and to gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from anytron.sequences import scopes
from anytron_megatron.training import parallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from megatron.core.transformer.module import MegatronModule
    from torch import Tensor, nn

    from anytron.algorithms.contract import LossFunction
    from anytron.sequences.batch import RaggedBatch, TokenOutputs
    from anytron.sequences.scopes import ScopeFactory
    from anytron_megatron.training.micro_batch import BatchPreparer, PreparedBatch


Result = TypeVar("Result")


class OutputHead(Protocol):
    """Replaces the forward of a model's output layer, on the last pipeline stage."""

    def scope(self, prepared: PreparedBatch) -> ScopeFactory | None:
        """Make the context in which the output layer computes a micro-batch's results; None = no context needed."""

    def token_outputs(self, answers: Tensor, prepared: PreparedBatch) -> TokenOutputs:
        """Return the outputs that a loss or a scoring pass uses, from the output layer's results.

        ``answers``, float32 ``[T, N]``, is in the order of the micro-batch's tokens; its entry t was computed at token
        t, whereas :class:`TokenOutputs` holds an entry for each token that was predicted.
        """


class Feature(Protocol):
    """Adds a context to a micro-batch's forward pass and its recomputation: router replay, multi-token prediction."""

    def __call__(self, chunk: int, prepared: PreparedBatch) -> ScopeFactory | None:
        """Make the context for a micro-batch in the rank's chunk number ``chunk``; None = no context needed."""


@dataclass(frozen=True)
class ModelChunk:
    """One pipeline stage's part of a model on this rank.

    Attributes:
        module: The module to run: the model, or its data-parallel wrapper.
        head: Replaces the output layer's forward on the last stage; None elsewhere.
    """

    module: MegatronModule
    head: OutputHead | None


def forward(
    chunks: Sequence[ModelChunk],
    micro_batches: Sequence[RaggedBatch],
    preparer: BatchPreparer,
    *features: Feature,
) -> list[TokenOutputs]:
    """Compute a model's outputs for the tokens of some micro-batches, without gradients. A collective.

    Every rank has the same number of micro-batches. Chunks need not be wrapped for training. Each of ``features``
    adds a context to the forward pass, such as router replay.

    Returns:
        Each micro-batch's outputs, on the host; an empty list except on the last pipeline stage.
    """

    def collect(outputs: TokenOutputs, _: PreparedBatch) -> tuple[Tensor, TokenOutputs]:
        return torch.zeros((), device=preparer.device), outputs.to(torch.device("cpu"))

    for chunk in chunks:
        chunk.module.eval()
    with torch.no_grad():
        return _run(chunks, micro_batches, preparer, collect, features, forward_only=True)


def forward_backward(
    chunks: Sequence[ModelChunk],
    micro_batches: Sequence[RaggedBatch],
    preparer: BatchPreparer,
    loss_fn: LossFunction,
    *features: Feature,
) -> list[Mapping[str, Tensor]]:
    """Add the gradients of some micro-batches' loss to the gradient buffers. A collective.

    Every rank has the same number of micro-batches; chunks must be wrapped for training.

    Returns:
        Each micro-batch's metrics; an empty list except on the last pipeline stage.
    """

    def compute_loss(outputs: TokenOutputs, prepared: PreparedBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        part = loss_fn(outputs, prepared.batch.to(preparer.device))
        loss = part.loss * prepared.loss_scale
        # Gradients tell every rank of a loss that is not finite; one that is infinite may have finite ones.
        return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan), part.metrics

    for chunk in chunks:
        chunk.module.train()
    return _run(chunks, micro_batches, preparer, compute_loss, features, forward_only=False)


def micro_batch_scope(
    number: int, chunk: ModelChunk, prepared: PreparedBatch, features: Sequence[Feature]
) -> ScopeFactory | None:
    """Combine the scopes of one chunk's forward pass of one micro-batch, which recomputations enter too.

    They are the scopes of the platform, the current mask, the output head and the features.
    """
    head = None if chunk.head is None else chunk.head.scope(prepared)
    return scopes.combine(prepared.scope(), head, *(feature(number, prepared) for feature in features))


def _run(
    chunks: Sequence[ModelChunk],
    micro_batches: Sequence[RaggedBatch],
    preparer: BatchPreparer,
    finish: Callable[[TokenOutputs, PreparedBatch], tuple[Tensor, Result]],
    features: Sequence[Feature],
    *,
    forward_only: bool,
) -> list[Result]:
    """Let Megatron's schedule drive the chunks, and collect what ``finish`` returns on the last stage.

    ``finish`` returns the loss, which Megatron divides by the number of micro-batches and averages over
    data-parallel replicas, and what is to be collected.
    """
    numbers = {id(chunk.module): number for number, chunk in enumerate(chunks)}

    def forward_step(
        batches: Iterator[RaggedBatch], module: MegatronModule
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Result]]]:
        prepared = preparer.prepare(next(batches), len(micro_batches))
        number = numbers[id(module)]
        with scopes.enter(micro_batch_scope(number, chunks[number], prepared, features)):
            output = module(**prepared.arguments())
        return output, partial(loss_step, chunks[number].head, prepared)

    def loss_step(head: OutputHead | None, prepared: PreparedBatch, output: Tensor) -> tuple[Tensor, Result]:
        assert head is not None, "Megatron calls this on the last pipeline stage only"
        answers = preparer.postprocess(output, prepared)
        return finish(head.token_outputs(answers, prepared), prepared)

    collected: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(micro_batches) for _ in chunks],
        model=[chunk.module for chunk in chunks],
        num_microbatches=len(micro_batches),
        # Shapes vary from micro-batch to micro-batch: pipeline stages tell each other the real ones
        # (variable_seq_lengths), and these two are not used.
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return collected


class FrozenModel:
    """A model that is never updated, such as a teacher or a reward model: no gradient buffers and no optimizer.

    Args:
        chunks: The model on this rank, not wrapped for training.
        preparer: Preparer of this model's inputs; another model has another preparer.
    """

    def __init__(self, chunks: Sequence[ModelChunk], preparer: BatchPreparer) -> None:
        self._chunks, self._preparer = chunks, preparer
        for module in self.modules:
            module.requires_grad_(False)

    def score(self, micro_batches: Sequence[RaggedBatch]) -> list[TokenOutputs] | None:
        """Compute the model's outputs (``TrainingEngine.score``); None if this rank's ``Topology.reports`` is False."""
        outputs = forward(self._chunks, micro_batches, self._preparer)
        return outputs if parallel.topology().reports else None

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of its chunks."""
        return [chunk.module for chunk in self._chunks]
