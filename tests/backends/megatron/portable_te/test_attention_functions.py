"""The functions beside the attention module: rotary embeddings, and the split of a projection."""

from __future__ import annotations

import pytest
import torch

from anytron_megatron.portable_te import pytorch as te
from tests.backends.megatron.portable_te.attention_cases import DIM, HEADS


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_is_megatrons_in_every_format(bound, interleaved):
    t = torch.randn(6, 2, HEADS, DIM)
    freqs = torch.randn(10, 1, 1, DIM // 2)
    freqs = freqs.repeat_interleave(2, -1) if interleaved else torch.cat([freqs, freqs], -1)
    rotate = te.attention.apply_rotary_pos_emb
    sequence_first = rotate(t, freqs, interleaved=interleaved)
    batch_first = rotate(t.transpose(0, 1), freqs, tensor_format="bshd", interleaved=interleaved)
    assert torch.equal(sequence_first, batch_first.transpose(0, 1))
    packed = rotate(
        t.transpose(0, 1).flatten(0, 1),
        freqs,
        tensor_format="thd",
        cu_seqlens=torch.tensor([0, 6, 12], dtype=torch.int32),
        interleaved=interleaved,
    )
    assert torch.equal(packed, batch_first.flatten(0, 1))
    # The first position of every sequence turns by the first angle.
    first = rotate(t[:1], freqs[:1], interleaved=interleaved)
    assert torch.equal(sequence_first[:1], first)


def test_rope_positions_of_a_context_parallel_rank_are_zigzag(bound):
    from anytron_megatron.portable_te.pytorch.attention.context_parallel import zigzag_positions

    cu_seqlens = torch.tensor([0, 8, 12], dtype=torch.int32)
    assert zigzag_positions(cu_seqlens, 2, 0).tolist() == [0, 1, 6, 7, 0, 3]
    assert zigzag_positions(cu_seqlens, 2, 1).tolist() == [2, 3, 4, 5, 1, 2]


def test_split_gives_contiguous_parts_and_joins_gradients():
    x = torch.randn(3, 6, requires_grad=True)
    first, second = te.attention._SplitAlongDim.apply(x, 1, [2, 4])
    assert second.is_contiguous()
    (first.sum() + 2 * second.sum()).backward()
    assert torch.equal(x.grad, torch.tensor([1.0, 1, 2, 2, 2, 2]).expand(3, 6))
