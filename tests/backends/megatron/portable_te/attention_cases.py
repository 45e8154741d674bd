"""Attention modules, operands, and the definition to check them against."""

from __future__ import annotations

import contextlib
from itertools import accumulate

import torch

from anytron.kernels.oracles.attention import reference_attention
from anytron_megatron.portable_te import pytorch as te

HEADS, KV_HEADS, DIM = 4, 2, 8
LENGTHS = [5, 3, 7]


def module(**settings):
    return te.DotProductAttention(HEADS, DIM, num_gqa_groups=KV_HEADS, **settings)


def operands(*leading):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*leading, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def cumulative(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def expected(query, key, value, lengths, **settings):
    output = reference_attention(query, key, value, lengths=lengths, scale=DIM**-0.5, **settings)
    return output.float().flatten(-2)


def attend_flat(attention, inputs, layout, lengths, starts):
    """Attend in a layout; operands and result are rows of all sequences, one after the other."""
    if layout == "thd":
        real, padded = cumulative(lengths), torch.tensor(starts, dtype=torch.int32)
        return attention(
            *inputs,
            qkv_format="thd",
            cu_seqlens_q=real,
            cu_seqlens_kv=real,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
        )
    batch = [operand.unflatten(0, (len(lengths), -1)) for operand in inputs]
    mask = torch.arange(starts[1])[None] >= torch.tensor(lengths)[:, None]
    if layout == "bshd":
        return attention(*batch, mask[:, None, None], qkv_format="bshd").flatten(0, 1)
    sequence_first = attention(*(operand.transpose(0, 1) for operand in batch), mask[:, None, None])
    return sequence_first.transpose(0, 1).flatten(0, 1)


class Tracker:
    """A tracker of random states that counts how often one is entered."""

    def __init__(self):
        self.forks = 0

    def __call__(self):
        return self

    @contextlib.contextmanager
    def fork(self):
        self.forks += 1
        yield
