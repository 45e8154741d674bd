"""Batches that rollout, rewards and training exchange: ragged sequences of tokens, never padded.

All per-token values are flat ``[T]`` and in *token* coordinates: entry t belongs to token t. The
log-prob of a token is the log-probability of drawing it after the tokens before it; the entry of the first token of
a sequence is 0. Log-probs of prompts are not computed, because prompts are not trained; these entries are 0 too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anytron.sequences import encoding
from anytron.sequences.ranges import bounds_of, counts_of, slices, taken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.task.data.images import ImagePatches


_PER_SEQUENCE = ("lengths", "groups", "responses")
_OF_UPDATES = (
    "groups", "responses", "rollout_log_probs", "old_log_probs", "reference_log_probs", "teacher_log_probs",
    "token_rewards", "advantages", "values", "returns", "loss_weights", "token_shares",
)  # fmt: skip
"""Fields that scoring does not read."""


@dataclass(frozen=True)
class RaggedBatch:
    """``B`` sequences (prompt and response), concatenated.

    Attributes:
        lengths: int64 ``[B]``, tokens of each sequence, prompt included, at least 1.
        tokens: int64 ``[T]``; int32 in the driver, which holds the tokens of a whole step.
        response_mask: bool ``[T]``, True = the model wrote the token. Tokens that an environment wrote within a
            response are not trained; the model reads them like a prompt.
        temperature: Sampling temperature; log-probs are computed from logits divided by it.
        groups: int64 ``[B]``, number of the prompt of each sequence; sequences of a prompt are
            adjacent, and there may be a different number for each prompt. None if every sequence has its own prompt.
        responses: int64 ``[B]``, number of the response of each sequence, ascending. An agent may hold several
            conversations for one response; they are adjacent sequences with one reward, which count as one sample of
            their group. None if every sequence is a response.
        rollout_log_probs: float32 ``[T]``, as the rollout engine computed them; 0 outside of responses. None if no
            rollout engine did.
        old_log_probs: float32 ``[T]``, log-probs of the training engine before this step's updates; None if the
            batch is used for a single update, which takes the current log-probs.
        reference_log_probs: float32 ``[T]``, log-probs of the reference model; None without one.
        teacher_log_probs: float32 ``[T]``, log-probs of the teacher; None without one.
        token_rewards: float32 ``[T]``, the reward of each token of a response: minus its KL penalty if that is part of
            the reward, and at the last token plus the response's reward. None except while advantages are estimated.
        advantages: float32 ``[T]``; None before they are estimated.
        values: float32 ``[T]``, the critic's values before this step's updates; entry t is the value of the state
            before token t; None without a critic.
        returns: float32 ``[T]``, the targets of the critic's values; None without a critic.
        loss_weights: float32 ``[T]``, weight of each token in the loss. For a mean, they add up to 1 over all
            micro-batches and ranks of one optimizer update. None before they are known.
        token_shares: float32 ``[T]``, weights for the averages of metrics: equal for all response tokens of the
            update, 0 elsewhere, with a sum of 1. None before they are known.
        routing: uint8 or int16 ``[T, L, K]``, the experts that each of L mixture-of-experts layers chose for
            a token, either in the rollout or when the old log-probs were computed. From the rollout, the row of the
            last token of a sequence is not valid. None if routing is not replayed.
        images: B entries, each sequence's images, None for a sequence without; None if no sequence has
            any. ``tokens`` contains the image tokens already, one for each embedding that the model makes of the
            patches.
        is_filler: Whether the micro-batch exists only because every data-parallel replica must run equally many; its
            tokens are not counted anywhere. A micro-batch that has no token to train is no filler: its tokens count for
            the balance of experts.
    """

    lengths: Tensor
    tokens: Tensor
    response_mask: Tensor
    temperature: float = 1.0
    groups: Tensor | None = None
    responses: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    old_log_probs: Tensor | None = None
    reference_log_probs: Tensor | None = None
    teacher_log_probs: Tensor | None = None
    token_rewards: Tensor | None = None
    advantages: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    loss_weights: Tensor | None = None
    token_shares: Tensor | None = None
    routing: Tensor | None = None
    images: tuple[ImagePatches | None, ...] | None = None
    is_filler: bool = False

    @property
    def num_sequences(self) -> int:
        """Number of sequences, B."""
        return self.lengths.numel()

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return self.tokens.numel()

    def select(self, sequences: Tensor) -> RaggedBatch:
        """Take some sequences, in the given order.

        Args:
            sequences: int64 ``[K]`` indices.
        """
        starts = self._starts[sequences].numpy()
        ranges = slices(starts, starts + self.lengths[sequences].numpy())
        per_token: dict[str, Any] = {
            name: torch.from_numpy(taken(values.numpy(), ranges)) for name, values in self._per_token().items()
        }
        images = None if self.images is None else tuple(self.images[index] for index in sequences.tolist())
        per_sequence: dict[str, Any] = {name: values[sequences] for name, values in self._per_sequence().items()}
        return replace(self, images=images, **per_sequence, **per_token)

    def for_scoring(self) -> RaggedBatch:
        """Return a batch with the fields that a model reads to compute scores. The fields of updates are None."""
        nothing: dict[str, Any] = dict.fromkeys(_OF_UPDATES)
        return replace(self, **nothing)

    def scored(self, outputs: TokenOutputs) -> RaggedBatch:
        """Add the policy's log-probs from before this step's updates, and its routing if it was recorded."""
        routing = self.routing if outputs.routing is None else outputs.routing
        return replace(self, old_log_probs=outputs.log_probs, routing=routing)

    def to(self, device: torch.device) -> RaggedBatch:
        """Copy the per-token values to ``device``; values of sequences and images stay on the host."""
        per_token: dict[str, Any] = {name: values.to(device) for name, values in self._per_token().items()}
        return replace(self, **per_token)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the batch in its compact form."""
        return _decoded, (encoding.encode(self._fields()),)

    @cached_property
    def response_counts(self) -> Tensor:
        """Number of each sequence's tokens that the model wrote, int64 ``[B]``."""
        return torch.from_numpy(counts_of(*bounds_of(self.response_mask.numpy()), self.lengths.numpy()))

    @cached_property
    def _starts(self) -> Tensor:
        return self.lengths.cumsum(0) - self.lengths

    def _fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def _per_token(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._tensors().items() if name not in _PER_SEQUENCE}

    def _per_sequence(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._tensors().items() if name in _PER_SEQUENCE}

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._fields().items() if isinstance(value, Tensor)}


def _decoded(encoded: dict[str, Any]) -> RaggedBatch:
    return RaggedBatch(**encoding.decode(encoded))


def as_filler(batch: RaggedBatch) -> RaggedBatch:
    """Return the batch as a filler (:attr:`RaggedBatch.is_filler`): its weights in the loss and in metrics are 0."""
    nothing = torch.zeros(batch.num_tokens)
    return replace(batch, loss_weights=nothing, token_shares=nothing, is_filler=True)


def micro_batches_of(joined: RaggedBatch, counts: Sequence[int], fillers: Sequence[bool]) -> list[RaggedBatch]:
    """Divide the batch that joins a replica's micro-batches into these micro-batches, which share its memory.

    Args:
        joined: Sequences of all micro-batches, one micro-batch behind the other.
        counts: Number of sequences of each micro-batch.
        fillers: Whether each micro-batch is a filler (:attr:`RaggedBatch.is_filler`).
    """
    sizes = [int(lengths.sum()) for lengths in joined.lengths.split(list(counts))]
    fields: dict[str, Sequence[Any]] = {
        **{name: values.split(sizes) for name, values in joined._per_token().items()},
        **{name: values.split(list(counts)) for name, values in joined._per_sequence().items()},
    }
    if joined.images is not None:
        images = iter(joined.images)
        fields["images"] = [tuple(islice(images, count)) for count in counts]
    parts = [replace(joined, **dict(zip(fields, part, strict=True))) for part in zip(*fields.values(), strict=True)]
    return [as_filler(part) if filler else part for part, filler in zip(parts, fillers, strict=True)]


def token_index(lengths: Tensor, sequences: Tensor) -> Tensor:
    """Return the flat indices of the tokens of some sequences.

    Args:
        lengths: int64 ``[B]``, tokens of each sequence of the batch.
        sequences: int64 ``[K]``, indices of the sequences.

    Returns:
        int64, one index for each token of these sequences.
    """
    chosen = lengths[sequences]
    first = (lengths.cumsum(0) - lengths)[sequences] - (chosen.cumsum(0) - chosen)
    return torch.repeat_interleave(first, chosen) + torch.arange(int(chosen.sum()))


@dataclass(frozen=True)
class TokenOutputs:
    """The outputs of a model for the tokens of a batch; a field is None if the model does not compute it.

    A loss reads it, with gradients (:class:`anytron.algorithms.contract.LossFunction`), and scoring returns it,
    without gradients and on the host.

    Attributes:
        log_probs: float32 ``[T]``, the log-prob of each token of a response, 0 elsewhere; None from a model with a
            value head.
        entropy: float32 ``[T]``, entropy of the distribution from which each such token was drawn; None like
            ``log_probs``.
        predicted: One float32 ``[T]`` for each depth of multi-token prediction: the log-prob of each token as
            depth d predicted it, 0 for the first 1 + d tokens of a sequence.
        values: float32 ``[T]``; entry t is the value of the state before token t, 0 for the first token of a sequence;
            None without a value head.
        logits: ``[T, V]``, row t after token t, not divided by the temperature; None unless requested, because
            training never makes whole logits.
        routing: uint8 or int16 ``[T, L, K]``, the experts that each of L mixture-of-experts layers chose for
            a token; None unless the engine records it.
        scores: float32 ``[B]``, how good each sequence is; None unless the model is a reward model.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    predicted: tuple[Tensor, ...] = ()
    values: Tensor | None = None
    logits: Tensor | None = None
    routing: Tensor | None = None
    scores: Tensor | None = None

    def to(self, device: torch.device) -> TokenOutputs:
        """Copy everything to ``device``."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        copied: dict[str, Any] = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, predicted=tuple(log_probs.to(device) for log_probs in self.predicted), **copied)
