"""Compute a prompt once for all of its samples.

A group of samples repeats its prompt: sixteen answers to a question read it sixteen times, and only the answers are
trained. In a causal model the states of a prompt's tokens do not depend on what follows. So a micro-batch of packed
sequences is split into *pieces*: each shared prefix (a prompt without its last token) once, and the rest of each
sequence. The model computes the pieces. Only attention needs more than a piece: its queries attend to the keys of the
whole sequence, which :attr:`SharedPrompts.keys` collects.

The last token of a prompt stays with each sample. The label at its position is the first token that this sample wrote;
so no position has two labels. The gradients of rows that are copied several times are summed
(:class:`Repeats`).

::

    sequences   [p0 p1 p2 a0 a1] [p0 p1 p2 b0]      T = 9
    pieces      [p0 p1] [p2 a0 a1] [p2 b0]          T' = 7, lengths 2 3 2, starts 0 2 2
    keys        [p0 p1] [p0 p1 p2 a0 a1] [p0 p1 p2 b0]
"""

from __future__ import annotations

import contextlib
import contextvars
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from anytron.sequences.layout import SequenceLayout
    from anytron.sequences.scopes import ScopeFactory

WORTHWHILE = 0.9
"""Prompts are shared if no more than this part of the tokens is left: keys and values are copied for each sample."""


@dataclass(frozen=True)
class Pieces:
    """``P`` pieces, ``T'`` tokens in all, into which ``B`` sequences with common prompts are split. On the host.

    Attributes:
        lengths: int64 ``[P]``, tokens of each piece; shared prefixes first, then one piece of each sequence.
        starts: int64 ``[P]``, position of a piece's first token in its sequence.
        tokens: int64 ``[T']``, for each token of the pieces, one flat token ``[T]`` that it stands for.
        places: int64 ``[T]``, for each flat token, the token of the pieces that stands for it.
        prefixes: Number of pieces that are shared prefixes.
    """

    lengths: Tensor
    starts: Tensor
    tokens: Tensor
    places: Tensor
    prefixes: int

    def longest(self, layout: SequenceLayout) -> int:
        """Number of slots of the longest whole sequence, with the padding of its last piece in ``layout``.

        ``layout`` is a layout of the pieces.
        """
        return int((self.starts + layout.padded_lengths).max())

    def position_ids(self, layout: SequenceLayout, context_length: int) -> Tensor:
        """Return positions in the whole sequences, int64 ``[R, C]``, for a layout of the pieces, padding included."""
        padded = torch.diff(layout.cu_seqlens_padded.long())
        starts = torch.repeat_interleave(self.starts.to(padded.device), padded, output_size=layout.position_ids.numel())
        return (layout.position_ids + starts).clamp_(max=context_length - 1)


def common_prompts(lengths: Tensor, tokens: Tensor, response_mask: Tensor) -> Pieces | None:
    """Find the prompts that several sequences of a micro-batch begin with.

    Args:
        lengths: int64 ``[B]`` (host).
        tokens: int64 ``[T]`` (host).
        response_mask: bool ``[T]``, True = written by the model; the tokens before the first of these are the prompt.

    Returns:
        The pieces; None if a share of more than :data:`WORTHWHILE` of the tokens would remain.
    """
    begins = torch.cumsum(lengths, 0) - lengths
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)  # of each token
    position = torch.arange(len(tokens)) - begins[sequence]
    shared = _prefix_lengths(begins, lengths, response_mask)
    first = _first_with_the_same(begins, shared, tokens)
    times = torch.bincount(first, minlength=len(lengths))
    shared = shared.masked_fill(times[first] == 1, 0)
    chosen = ((times > 1) & (shared > 0)).nonzero()[:, 0]
    prefix_lengths = shared[chosen]
    count = int(prefix_lengths.sum())
    if count + int((lengths - shared).sum()) > WORTHWHILE * len(tokens):
        return None
    in_prefix = position < shared[sequence]
    of_first = first[sequence] == sequence
    flat = torch.cat([(in_prefix & of_first).nonzero()[:, 0], (~in_prefix).nonzero()[:, 0]])
    prefix_begins = torch.zeros_like(lengths).index_copy_(0, chosen, torch.cumsum(prefix_lengths, 0) - prefix_lengths)
    places = prefix_begins[first][sequence] + position
    places[flat[count:]] = torch.arange(count, len(flat))
    return Pieces(
        lengths=torch.cat([prefix_lengths, lengths - shared]),
        starts=torch.cat([torch.zeros_like(prefix_lengths), shared]),
        tokens=flat,
        places=places,
        prefixes=len(chosen),
    )


def _prefix_lengths(begins: Tensor, lengths: Tensor, response_mask: Tensor) -> Tensor:
    """Tokens of each prompt without its last one, int64 ``[B]``; a sequence without a response is all prompt."""
    written = response_mask.nonzero()[:, 0]
    # The first token that the model wrote at or after a sequence's begin; another sequence's if it wrote none here.
    following = torch.searchsorted(written, begins)
    written = torch.cat([written, torch.tensor([len(response_mask)])])
    return (torch.minimum(written[following] - begins, lengths) - 1).clamp_(min=0)


def _first_with_the_same(begins: Tensor, counts: Tensor, tokens: Tensor) -> Tensor:
    """For each sequence the first one that begins with the same tokens, as many as ``counts`` says: int64 ``[B]``."""
    values, known = tokens.numpy(), dict[bytes, int]()
    spans = zip(begins.tolist(), counts.tolist(), strict=True)
    found = [known.setdefault(values[begin : begin + count].tobytes(), at) for at, (begin, count) in enumerate(spans)]
    return torch.tensor(found)


@dataclass(frozen=True)
class SharedPrompts:
    """How the keys of attention and the model's outputs are mapped from pieces to whole sequences.

    Attributes:
        pieces: The pieces that the layout arranges (host).
        cu_seqlens_keys: int32 ``[P + 1]``, leading 0: cumulative numbers of the keys of each piece (device).
        keys: Copies the layout's ``N`` slots to the keys of all pieces. The keys of a piece are its tokens and all
            earlier tokens of its sequence.
        answers: Copies rows of the pieces' ``T'`` tokens to the ``T`` flat tokens of the sequences.
    """

    pieces: Pieces
    cu_seqlens_keys: Tensor
    keys: Repeats
    answers: Repeats

    @classmethod
    def of(cls, pieces: Pieces, layout: SequenceLayout) -> SharedPrompts:
        """Map a layout of the pieces to the keys of each piece, and the pieces' tokens to those of the sequences.

        Args:
            pieces: The pieces, on the host.
            layout: Layout of the pieces: packed, not split over context-parallel ranks, and on the host.
        """
        own = torch.arange(int(pieces.lengths[: pieces.prefixes].sum()))
        ends = torch.cumsum(pieces.starts + pieces.lengths, 0)
        return cls(
            pieces,
            torch.nn.functional.pad(ends, (1, 0)).to(torch.int32),
            Repeats.of(layout.slot_index[torch.cat([own, pieces.places])], layout.token_index.numel()),
            Repeats.of(pieces.places, len(pieces.tokens)),
        )

    def to(self, device: torch.device) -> SharedPrompts:
        """Copy the device fields to the layout's device."""
        lengths = self.cu_seqlens_keys.to(device, non_blocking=True)
        return SharedPrompts(self.pieces, lengths, self.keys.to(device), self.answers.to(device))


_current: contextvars.ContextVar[SharedPrompts | None] = contextvars.ContextVar("anytron_prompts", default=None)


def scope_of(prompts: SharedPrompts) -> ScopeFactory:
    """Return a factory of scopes within which :func:`current_prompts` returns ``prompts``, those of one micro-batch."""

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        token = _current.set(prompts)
        try:
            yield
        finally:
            _current.reset(token)

    return scope


def current_prompts() -> SharedPrompts | None:
    """Return the shared prompts of the micro-batch whose forward pass, or recomputation, is running, if it has any."""
    return _current.get()


@dataclass(frozen=True)
class Repeats:
    """Copies rows: for each of ``K`` copies it holds the index of the original among ``N`` rows.

    Copying is a gather, and so is summing the copies' gradients: a scatter-add is slow on CPUs, and on some devices not
    deterministic.

    Attributes:
        source: int64 ``[K]``, the original row of each copy.
    """

    source: Tensor
    _single: Tensor  # [N], the only copy of each row
    _other: Tensor  # the rows that have none, or several
    _repeated: Tensor  # [U], the rows that have several
    _copies: Tensor  # [U * most], the copies of those
    _missing: Tensor  # where there are fewer

    @classmethod
    def of(cls, source: Tensor, rows: int) -> Repeats:
        """Build the index tables that :meth:`take` and :meth:`collect` use, on the host.

        Args:
            source: int64 ``[K]``, the original row of each copy.
            rows: Number of original rows, N.
        """
        times = torch.bincount(source, minlength=rows)
        repeated = (times > 1).nonzero()[:, 0]
        single = torch.full((rows,), -1)
        single[source] = torch.arange(len(source))
        single[repeated] = -1
        # The copies of each repeated row, in their order, padded to the most that one has.
        number = torch.full((rows,), -1)
        number[repeated] = torch.arange(len(repeated))
        copies = (number[source] >= 0).nonzero()[:, 0]
        copies = copies[torch.argsort(number[source[copies]], stable=True)]
        counts = times[repeated]
        column = torch.arange(len(copies)) - torch.repeat_interleave(torch.cumsum(counts, 0) - counts, counts)
        table = torch.full((len(repeated), int(times.max())), -1)
        table[number[source[copies]], column] = copies
        table = table.flatten()
        return cls(
            source,
            single.clamp(min=0),
            (single < 0).nonzero()[:, 0],
            repeated,
            table.clamp(min=0),
            (table < 0).nonzero()[:, 0],
        )

    def to(self, device: torch.device) -> Repeats:
        """Copy to a device."""
        return Repeats(**{name: index.to(device, non_blocking=True) for name, index in vars(self).items()})

    def take(self, rows: Tensor) -> Tensor:
        """Copy rows: ``[N, ...]`` -> ``[K, ...]``. A row's gradient is the sum of its copies' gradients, in order."""
        taken: Tensor = _Take.apply(rows, self)  # type: ignore[no-untyped-call]
        return taken

    def collect(self, copies: Tensor) -> Tensor:
        """Add up each row's copies: ``[K, ...]`` -> ``[N, ...]``, 0 where there is none. Transpose of :meth:`take`."""
        collected = copies.index_select(0, self._single).index_fill_(0, self._other, 0)
        if not len(self._repeated):
            return collected
        several = copies.index_select(0, self._copies).index_fill_(0, self._missing, 0)
        sums = several.view(len(self._repeated), -1, *copies.shape[1:]).sum(1)
        return collected.index_copy_(0, self._repeated, sums)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, repeats: Repeats) -> Tensor:
        ctx.repeats = repeats
        return rows.index_select(0, repeats.source)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.repeats.collect(gradients), None
