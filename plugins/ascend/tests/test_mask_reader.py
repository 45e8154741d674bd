"""The reader of ``npu_fusion_attention``'s modes accepts what is exact and shows what is not."""

from __future__ import annotations

import pytest
import torch

from anytron.base.traits import ModelTraits
from anytron.kernels.oracles.masks import defined_pairs
from anytron.sequences.layout import ContextShard
from anytron.sequences.masks import AttnMask, MaskKind, Polarity
from anytron.sequences.planning import plan_layout
from anytron_ascend.kernels.mask_reader import read_mindspeed, read_npu_fusion_attention

LENGTHS = [3, 1, 4]
CAUSAL = ModelTraits()
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def layouts(format, cp=1, lengths=LENGTHS):
    return [plan_layout(lengths, format=format, shard=ContextShard(cp, rank)) for rank in range(cp)]


@pytest.mark.parametrize("format", ["thd", "bshd"])
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("sparse_mode", [2, 3])
def test_the_compressed_triangle_is_exact(format, cp, sparse_mode):
    shards = layouts(format, cp)
    assert read_npu_fusion_attention(f"sparse_mode={sparse_mode}", TRIANGLE, shards) == defined_pairs(LENGTHS, CAUSAL)


def test_the_band_is_a_window():
    pairs = read_npu_fusion_attention("sparse_mode=4,pre_tokens=1,next_tokens=0", TRIANGLE, layouts("thd"))
    assert pairs == defined_pairs(LENGTHS, ModelTraits(window=(1, 0)))


def test_mode_0_cuts_the_mask_with_its_window_and_mode_1_does_not():
    nothing, rows = torch.zeros(1, 1, 3, 3, dtype=torch.bool), layouts("bshd", lengths=[3])
    assert read_npu_fusion_attention("sparse_mode=0,next_tokens=0", nothing, rows) == defined_pairs([3], CAUSAL)
    whole = read_npu_fusion_attention("sparse_mode=1,next_tokens=0", nothing, rows)
    assert whole == defined_pairs([3], ModelTraits(causal=False))


def test_without_a_mask_the_mode_is_ignored():
    """Mode 2 without the triangle is not causal: the documentation says mode and windows are ignored."""
    pairs = read_npu_fusion_attention("sparse_mode=2", None, layouts("bshd", lengths=[2]))
    assert pairs == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_a_full_mask_under_sparse_mode_2_breaks_the_operators_contract():
    """verl hands ``[B, 1, S, S]`` to MindSpeed, which reads it with ``sparse_mode=2`` (divergence, bug 7)."""
    full = torch.zeros(3, 1, 4, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="compressed mask, an upper triangle"):
        read_npu_fusion_attention("sparse_mode=2", full, layouts("bshd"))
    with pytest.raises(ValueError, match="no sparse_mode"):
        read_npu_fusion_attention("sparse_mode=6", None, layouts("bshd"))
    with pytest.raises(ValueError, match="packed sequences, or rows that several ranks"):
        read_npu_fusion_attention("sparse_mode=1", full, layouts("bshd", 2))


def test_mindspeed_makes_the_triangle_where_it_gets_no_mask():
    mask = AttnMask(MaskKind.NONE, "sparse_mode=2")
    assert read_mindspeed(mask, layouts("bshd"), CAUSAL) == defined_pairs(LENGTHS, CAUSAL)
    later = torch.ones(4, 4, dtype=torch.bool).triu(1).expand(3, 1, 4, 4)
    full = AttnMask(MaskKind.FULL_4D, "sparse_mode=1", ~later, Polarity.KEEP)
    assert defined_pairs(LENGTHS, CAUSAL) == read_mindspeed(full, layouts("bshd"), CAUSAL)
