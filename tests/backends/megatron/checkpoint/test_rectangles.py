"""Flat ranges as rectangles, and what rectangles share."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from anytron_megatron.checkpoint.rectangles import overlap, rectangles

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def ranges(draw):
    shape = draw(SHAPES)
    begin, end = sorted(draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    return shape, begin, end


@given(ranges())
def test_the_rectangles_of_a_range_are_its_elements_in_order(found):
    shape, begin, end = found
    tensor = torch.arange(math.prod(shape)).view(shape)
    pieces = []
    for offset, size, position in rectangles(shape, begin, end):
        piece = tensor[tuple(slice(a, a + length) for a, length in zip(offset, size, strict=True))]
        assert piece.is_contiguous()
        assert piece.flatten()[0] == position
        pieces.append(piece.flatten())
    assert torch.cat([torch.zeros(0, dtype=torch.long), *pieces]).tolist() == list(range(begin, end))


@given(ranges())
def test_they_are_few(found):
    shape, begin, end = found
    assert len(list(rectangles(shape, begin, end))) <= max(1, 2 * len(shape) - 1)


@given(st.data())
def test_what_two_rectangles_share(data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))

    def rectangle():
        pairs = [sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2))) for n in shape]
        return [a for a, _ in pairs], [b - a for a, b in pairs]

    tensor = torch.arange(math.prod(shape)).view(shape)
    (offset, size), (other_offset, other_size) = rectangle(), rectangle()
    one = tensor[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))]
    other = tensor[tuple(slice(a, a + n) for a, n in zip(other_offset, other_size, strict=True))]
    shared = overlap(offset, size, other_offset, other_size)
    expected = set(one.flatten().tolist()) & set(other.flatten().tolist())
    if shared is None:
        assert expected == set()
    else:
        assert set(one[shared[0]].flatten().tolist()) == expected
        assert torch.equal(one[shared[0]], other[shared[1]])
