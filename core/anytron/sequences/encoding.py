"""The form in which a batch is pickled: without the zeros outside of responses, and equal bits after unpickling.

A batch of GRPO with old log-probs takes 29 bytes a token in memory, and at most 12 pickled:

* token ids are int32, masks are bits;
* of float32 values that are 0 outside of responses, only those of responses are stored;
* of those that are also equal in all tokens of a response, such as advantages, one of each sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

MASK = "response_mask"
_INT32 = 1 << 31


class Ids(NamedTuple):
    """int64 values, ``[T]``, as int32."""

    values: Tensor

    def decode(self) -> Tensor:
        """Return the values."""
        return self.values.long()


class Bits(NamedTuple):
    """A mask of ``size`` tokens, eight in a byte."""

    bits: Tensor
    size: int

    def decode(self) -> Tensor:
        """Return the mask, bool ``[T]``."""
        return torch.from_numpy(np.unpackbits(self.bits.numpy(), count=self.size).view(np.bool_))


class InResponses(NamedTuple):
    """Values of the tokens of responses, in order; all others are 0."""

    values: Tensor

    def decode(self, places: Tensor, size: int) -> Tensor:
        """Return the values, ``[T]``.

        Args:
            places: int64, places of the tokens of responses.
            size: Number of tokens, T.
        """
        return torch.zeros(size, dtype=self.values.dtype).index_copy_(0, places, self.values)


class OfSequences(NamedTuple):
    """One value, ``[B]``, for all tokens of each sequence's response; all others are 0."""

    values: Tensor


class _Responses:
    """The tokens of a batch's responses.

    Args:
        lengths: int64 ``[B]``, tokens of each sequence.
        mask: bool ``[T]``, True = a token of a response.
    """

    def __init__(self, lengths: Tensor, mask: Tensor) -> None:
        self.size = mask.numel()
        self.places = mask.nonzero()[:, 0]
        within = torch.zeros(self.size + 1, dtype=torch.int64)
        torch.cumsum(mask, 0, out=within[1:])
        ends = within[lengths.cumsum(0)]
        self.counts = torch.diff(ends, prepend=ends.new_zeros(1))
        self.first = ends - self.counts

    def of_sequences(self, values: Tensor) -> Tensor:
        """Give each token of a response its sequence's value."""
        return values.repeat_interleave(self.counts)


def encode(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Encode the fields of a :class:`~anytron.sequences.batch.RaggedBatch`, on the host."""
    mask = fields[MASK]
    responses = _Responses(fields["lengths"], mask)
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if name == MASK:
            found[name] = Bits(torch.from_numpy(np.packbits(mask.numpy())), mask.numel())
        elif not isinstance(value, Tensor):
            found[name] = value
        elif value.dtype == torch.int64 and value.numel() and value.min() >= -_INT32 and value.max() < _INT32:
            found[name] = Ids(value.int())
        elif value.dtype == torch.float32 and value.shape == mask.shape:
            found[name] = _of_tokens(value, responses)
        else:
            found[name] = value
    return found


def decode(encoded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of which :func:`encode` has made ``encoded``."""
    found = {name: value.decode() if isinstance(value, (Ids, Bits)) else value for name, value in encoded.items()}
    responses = _Responses(found["lengths"], found[MASK])
    return {name: _per_token(value, responses) for name, value in found.items()}


def _per_token(value: Any, responses: _Responses) -> Any:
    if isinstance(value, OfSequences):
        return _per_token(InResponses(responses.of_sequences(value.values)), responses)
    return value.decode(responses.places, responses.size) if isinstance(value, InResponses) else value


def _of_tokens(values: Tensor, responses: _Responses) -> Tensor | InResponses | OfSequences:
    """Choose the smallest form of float32 values ``[T]``, by their bits: -0.0 and NaN are kept."""
    bits = values.view(torch.int32)
    inside = bits[responses.places]
    if bits.count_nonzero() != inside.count_nonzero():
        return values
    if len(inside):
        first = inside[responses.first.clamp(max=len(inside) - 1)].where(responses.counts > 0, 0)
        if torch.equal(responses.of_sequences(first), inside):
            return OfSequences(first.view(torch.float32))
    return InResponses(inside.view(torch.float32))
