"""Sequences of numbers that take as few bytes as an array.

A token id in a tuple takes 36 bytes, a log-prob 32. A step may have millions of them in the driver. Unpickling makes no
Python object per number: the numbers stay in the bytes that were pickled.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, groupby, repeat
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    from typing import Literal

    import numpy as np
    import numpy.typing as npt

Number = TypeVar("Number", int, float)


class _Numbers(Sequence[Number]):
    """An immutable sequence of numbers, equal to every sequence of the same numbers. Slices and sums are tuples."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Sequence) else NotImplemented

    def __add__(self, other: Sequence[Number]) -> tuple[Number, ...]:
        return tuple(self) + tuple(other)

    def __radd__(self, other: Sequence[Number]) -> tuple[Number, ...]:
        return tuple(other) + tuple(self)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


class Packed(_Numbers[Number]):
    """An immutable sequence of numbers, equal to every sequence of the same numbers. Slices and sums are tuples.

    ``json.dumps`` and the ``batch_decode`` of tokenizers refuse it: give them ``list(numbers)``.

    Args:
        code: Type of the numbers in memory: ``i`` = int32, ``b`` = bool in a byte, ``f`` = float32, to which numbers
            are rounded.
        numbers: The numbers.

    Raises:
        OverflowError: A number is out of the type's range.
        TypeError: An element is not a number of the type.
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

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle the numbers as bytes; with protocol 5, which a run's processes use, without a copy of them."""
        data = self._numbers.cast("B")
        return _unpickled, (self._numbers.format, PickleBuffer(data) if protocol >= 5 else bytes(data))


def _unpickled(code: str, data: bytes) -> Packed[Any]:
    packed = Packed.__new__(Packed)
    packed._numbers = memoryview(data).cast(code)  # type: ignore[call-overload]
    return packed


class Runs(_Numbers[int]):
    """An immutable sequence of int32 that stores each run of equal neighbours once, such as versions of weights.

    Args:
        numbers: The numbers.

    Raises:
        OverflowError: A number is out of the range of int32.
        TypeError: An element is not an integer.
    """

    __slots__ = ("_ends", "_values")

    def __init__(self, numbers: Sequence[int]) -> None:
        runs = [(value, sum(1 for _ in run)) for value, run in groupby(numbers)]
        self._values = array("i", (value for value, _ in runs))
        self._ends = array("i", accumulate(count for _, count in runs))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[int]:
        ends = self._ends
        counts = (end - start for start, end in zip((0, *ends[:-1]), ends, strict=bool(ends)))
        return chain.from_iterable(map(repeat, self._values, counts))

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...
    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        if isinstance(place, slice):
            return tuple(self)[place]
        return self._values[bisect_right(self._ends, range(len(self))[place])]

    @property
    def changes(self) -> Sequence[int]:
        """The numbers without repetitions: the first one, and each that differs from the one before it."""
        return self._values

    def as_numpy(self) -> npt.NDArray[np.int32]:
        """All numbers as an array, int32."""
        import numpy as np

        ends = np.array(self._ends, np.int32)
        return np.repeat(np.array(self._values, np.int32), ends - np.append(0, ends[:-1]))


def as_numpy(numbers: Sequence[float] | npt.NDArray[Any]) -> npt.NDArray[np.generic]:
    """Return numbers as an array, 1-D; packed numbers and arrays are not copied."""
    import numpy as np

    if isinstance(numbers, Packed):
        return np.frombuffer(numbers.buffer, numbers.buffer.format)
    return numbers.as_numpy() if isinstance(numbers, Runs) else np.asarray(numbers)
