"""Memory is given back to the device, and everything that looks at it finds its values again."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from anytron.workers.engines.device_memory import Parked


def test_views_and_tensors_that_share_memory_find_their_bits_again():
    whole = torch.randn(6, 5)
    whole[0, 0] = torch.nan
    row, transposed, tied = whole[2], whole.t(), whole.view(-1)
    alone = torch.arange(7)
    expected = [one.clone() for one in (whole, row, transposed, tied, alone)]

    parked = Parked([whole, tied, alone, torch.empty(0)], pin=False)
    assert parked.num_bytes == 6 * 5 * 4 + 7 * 8
    assert {one.untyped_storage().nbytes() for one in (whole, row, transposed, tied, alone)} == {0}
    parked.take_back()
    parked.take_back()
    for one, before in zip((whole, row, transposed, tied, alone), expected, strict=True):
        assert torch.equal(one.contiguous().view(torch.uint8), before.contiguous().view(torch.uint8))
    whole[2] += 1
    assert torch.equal(row, whole[2])


def test_what_is_dropped_comes_back_as_zeros_unless_its_memory_is_kept_too():
    buffer, kept = torch.ones(4), torch.ones(3)
    parked = Parked([kept], [buffer, buffer[1:], kept[:2]], pin=False)
    assert parked.num_bytes == 7 * 4
    assert (buffer.untyped_storage().nbytes(), kept.untyped_storage().nbytes()) == (0, 0)
    parked.take_back()
    assert (buffer.tolist(), kept.tolist()) == ([0.0] * 4, [1.0] * 3)


@given(st.lists(st.sampled_from([torch.float64, torch.bfloat16, torch.int8]), max_size=4), st.integers(0, 9))
def test_every_dtype_keeps_its_bits(dtypes, size):
    tensors = [torch.randn(size).mul(9).to(dtype) for dtype in dtypes]
    before = [tensor.clone() for tensor in tensors]
    Parked(tensors, pin=False).take_back()
    assert all(torch.equal(one, other) for one, other in zip(tensors, before, strict=True))
