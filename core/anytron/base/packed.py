"""Sequences of numbers that take as few bytes as an array.

A token id in a tuple takes 36 bytes, a log-prob 32. A step may have millions of them in the driver. Unpickling makes no
Python object per number: the numbers stay in the bytes that were pickled.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, groupby, repeat
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    from typing import Literal

    import numpy as np
    import numpy.typing as npt

Number = TypeVar("Number", int, float)
_CODES = {"int32": "i", "float32": "f", "bool": "b"}


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
    """An immutable sequence of numbers, equal to every sequence of the same numbers.

    Slices and concatenations are tuples. ``json.dumps`` and the ``batch_decode`` of tokenizers refuse it: give them
    ``list(numbers)``.

    Args:
        code: Type of the numbers in memory: ``i`` = int32, ``b`` = bool in a byte, ``f`` = float32, to which numbers
            are rounded.
        numbers: The numbers.

    Raises:
        OverflowError: A number is out of the type's range.
        TypeError: An element is not a number of the type.
    """

    __slots__ = ("_code", "_data")

    def __init__(self, code: Literal["i", "b", "f"], numbers: Sequence[Number]) -> None:
        self._code: str = code
        self._data: bytes = array(code, map(bool, numbers) if code == "b" else numbers).tobytes()

    @property
    def buffer(self) -> memoryview:
        """The numbers in memory, read-only."""
        view: memoryview = memoryview(self._data).cast(self._code)  # type: ignore[call-overload]
        return view

    def __len__(self) -> int:
        return len(self._data) if self._code == "b" else len(self._data) >> 2

    def __iter__(self) -> Iterator[Number]:
        return map(bool, self._data) if self._code == "b" else iter(self.buffer)

    @overload
    def __getitem__(self, place: int) -> Number: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Number]: ...
    def __getitem__(self, place: int | slice) -> Number | Sequence[Number]:
        if isinstance(place, slice):
            return tuple(self)[place]
        return bool(self._data[place]) if self._code == "b" else self.buffer[place]

    def __reduce__(self) -> tuple[Any, ...]:
        return _packed, (self._code, self._data)


def _packed(code: str, data: bytes) -> Packed[Any]:
    packed = Packed.__new__(Packed)
    packed._code, packed._data = code, data
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
        if len(set(numbers)) == 1:  # nearly all responses: three times as fast as to look for runs
            runs = [(numbers[0], len(numbers))]
        else:
            runs = [(value, sum(1 for _ in run)) for value, run in groupby(numbers)]
        self._values = tuple(array("i", [value for value, _ in runs]))  # array checks type and range
        self._ends = tuple(accumulate(count for _, count in runs))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(repeat(value, count) for value, count in self.runs)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...
    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        if isinstance(place, slice):
            return tuple(self)[place]
        return self._values[bisect_right(self._ends, range(len(self))[place])]

    def __reduce__(self) -> tuple[Any, ...]:
        return _runs, (self._values, self._ends)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The value and the length of each run of equal neighbours, in order."""
        before = (0, *self._ends)
        return [(value, end - start) for value, start, end in zip(self._values, before, self._ends, strict=False)]


def _runs(values: tuple[int, ...], ends: tuple[int, ...]) -> Runs:
    runs = Runs.__new__(Runs)
    runs._values, runs._ends = values, ends
    return runs


def as_numpy(numbers: Sequence[float] | npt.NDArray[Any]) -> npt.NDArray[np.generic]:
    """Return numbers as an array, 1-D; ``Packed`` numbers and arrays are not copied. Packed bools become int8."""
    import numpy as np

    return np.frombuffer(numbers._data, numbers._code) if type(numbers) is Packed else np.asarray(numbers)


def concatenated(parts: Iterable[Sequence[float] | npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Concatenate numbers to a writable array, 1-D; for short parts, several times as fast as ``numpy.concatenate``.

    Args:
        parts: The numbers.
        dtype: int32, float32 or bool; numbers of another type are converted, and must fit.
    """
    import numpy as np

    code = _CODES[np.dtype(dtype).name]

    def raw(one: Any) -> Any:
        return one._data if type(one) is Packed and one._code == code else np.ascontiguousarray(one, dtype)

    return np.frombuffer(bytearray().join(map(raw, parts)), dtype)
