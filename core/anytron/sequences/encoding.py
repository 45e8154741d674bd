"""The form in which a batch is pickled: without the zeros outside of responses; unpickling restores equal bits.

A batch of GRPO with old log-probs takes 29 bytes a token in memory, and about 12 pickled; log-probs of each further
model take 4 more:

* token ids are int32, masks are bits;
* of float32 values that are 0 outside of responses, only those of responses are stored;
* of values that are also equal in all tokens of a response, such as advantages, one for each sequence.

The code uses numpy, because it is several times as fast as torch here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anytron.sequences.ranges import bounds_of, counts_of, slices, taken

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

MASK = "response_mask"
_INT32 = 1 << 31


class Ids(NamedTuple):
    """int64 or int32 values, ``[T]``, stored as int32; decoding always returns int64."""

    values: Tensor


class Bits(NamedTuple):
    """A mask of ``size`` tokens, eight in a byte."""

    bits: Tensor
    size: int


class InResponses(NamedTuple):
    """The values of all response tokens, float32, in the order of the tokens; values outside of responses are 0."""

    values: Tensor


class OfSequences(NamedTuple):
    """One value for each sequence, float32 ``[B]``: that of all its response tokens. Other tokens have the value 0."""

    values: Tensor


class _Responses:
    """The tokens of a batch's responses.

    Args:
        lengths: int64 ``[B]``, tokens of each sequence, at least 1.
        mask: bool ``[T]``, True = a token of a response.
    """

    def __init__(self, lengths: Tensor, mask: Tensor) -> None:
        self._mask = mask.numpy()
        starts, ends = bounds_of(self._mask)
        self._ranges = slices(starts, ends)
        self._counts = counts_of(starts, ends, lengths.numpy())

    def encode(self, values: Tensor) -> Tensor | InResponses | OfSequences:
        """Choose the smallest form of float32 values ``[T]``, by their bits: -0.0 and NaN are kept."""
        bits = values.numpy().view(np.int32)
        inside = taken(bits, self._ranges)
        if np.count_nonzero(bits) != np.count_nonzero(inside):
            return values
        some = self._counts > 0
        ends = self._counts.cumsum()[some]
        last = inside[ends - 1]
        if np.array_equal(inside[ends - self._counts[some]], last) and np.array_equal(
            self._repeated(last, some), inside
        ):
            of_sequences = np.zeros(len(some), np.int32)
            of_sequences[some] = last
            return OfSequences(_floats(of_sequences))
        return InResponses(_floats(inside))

    def decode(self, value: Any) -> Any:
        """Return the values, float32 ``[T]``, of which :meth:`encode` has made ``value``; anything else as it is."""
        if isinstance(value, OfSequences):
            inside = self._repeated(value.values.numpy(), slice(None))
        elif isinstance(value, InResponses):
            inside = value.values.numpy()
        else:
            return value
        whole = np.zeros(len(self._mask), np.float32)
        whole[self._mask] = inside
        return torch.from_numpy(whole)

    def _repeated(self, of_sequences: npt.NDArray[Any], some: npt.NDArray[np.bool_] | slice) -> npt.NDArray[Any]:
        """Give each token of some sequences' responses its sequence's value."""
        return np.repeat(of_sequences, self._counts[some])


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
        elif value.dtype == torch.int32:
            found[name] = Ids(value)
        elif value.dtype == torch.int64 and value.numel() and _fits(value.numpy()):
            found[name] = Ids(value.int())
        elif value.dtype == torch.float32 and value.shape == mask.shape:
            found[name] = responses.encode(value)
        else:
            found[name] = value
    return found


def decode(encoded: Mapping[str, Any]) -> dict[str, Any]:
    """Undo :func:`encode`: return the fields of the batch."""
    found = {name: _widened(value) for name, value in encoded.items()}
    responses = _Responses(found["lengths"], found[MASK])
    return {name: responses.decode(value) for name, value in found.items()}


def _fits(values: npt.NDArray[np.int64]) -> bool:
    return bool(values.min() >= -_INT32 and values.max() < _INT32)


def _widened(value: Any) -> Any:
    if isinstance(value, Ids):
        return value.values.long()
    if isinstance(value, Bits):
        return torch.from_numpy(np.unpackbits(value.bits.numpy(), count=value.size).view(np.bool_))
    return value


def _floats(bits: npt.NDArray[np.int32]) -> Tensor:
    return torch.from_numpy(bits.view(np.float32))
