"""Sequences of numbers that take as few bytes as an array.

A token id in a tuple takes 36 bytes, a log-prob 32. A step may have millions of them in the driver. Unpickled numbers
stay in the bytes that the pickle had.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    from typing import Literal

    import numpy as np
    import numpy.typing as npt

Number = TypeVar("Number", int, float)


class Packed(Sequence[Number]):
    """An immutable sequence of numbers, equal to every sequence of the same numbers. Slices and sums are tuples.

    ``json.dumps`` and the ``batch_decode`` of tokenizers refuse it: give them ``list(numbers)``.

    Args:
        code: Type of the numbers in memory: ``i`` = int32, ``b`` = bool in a byte, ``f`` = float32, to which others are
            rounded.
        numbers: The numbers.

    Raises:
        OverflowError: A number does not fit the type.
        TypeError: It is not a number of the type.
    """

    __slots__ = ("_numbers",)

    def __init__(self, code: Literal["i", "b", "f"], numbers: Sequence[Number]) -> None:
        self._numbers = memoryview(array(code, numbers)).toreadonly()

    @property
    def buffer(self) -> memoryview:
        """The numbers in memory, read-only."""
        return self._numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Number]:
        return iter(self._numbers) if self._numbers.format != "b" else map(bool, self._numbers)

    @overload
    def __getitem__(self, place: int) -> Number: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Number]: ...
    def __getitem__(self, place: int | slice) -> Number | Sequence[Number]:
        if isinstance(place, slice):
            return tuple(self)[place]
        return self._numbers[place] if self._numbers.format != "b" else bool(self._numbers[place])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Packed):
            return bool(self._numbers == other._numbers)
        return tuple(self) == tuple(other) if isinstance(other, Sequence) else NotImplemented

    def __add__(self, other: Sequence[Number]) -> tuple[Number, ...]:
        return tuple(self) + tuple(other)

    def __radd__(self, other: Sequence[Number]) -> tuple[Number, ...]:
        return tuple(other) + tuple(self)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle the numbers as bytes; with protocol 5, which a run's processes use, without a copy of them."""
        data = self._numbers.cast("B")
        return _unpickled, (self._numbers.format, PickleBuffer(data) if protocol >= 5 else bytes(data))


def _unpickled(code: str, data: bytes) -> Packed[Any]:
    packed = Packed.__new__(Packed)
    packed._numbers = memoryview(data).cast(code)  # type: ignore[call-overload]
    return packed


def as_numpy(numbers: Sequence[float] | npt.NDArray[Any]) -> npt.NDArray[np.generic]:
    """Return numbers as an array, 1-D; packed numbers and arrays are not copied."""
    import numpy as np

    if isinstance(numbers, Packed):
        return np.frombuffer(numbers.buffer, numbers.buffer.format)
    return np.asarray(numbers)
