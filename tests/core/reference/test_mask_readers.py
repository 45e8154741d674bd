"""The readers of masks know right from wrong: each accepts what is exact and shows what is not."""

from __future__ import annotations

import pytest
import torch

from anytron.masks import AttnMask, MaskKind, Polarity
from anytron.reference.masks import (
    PADDING,
    defined_pairs,
    read_flash_attention,
    read_npu_fusion_attention,
    read_sdpa,
    read_transformer_engine,
)
from anytron.sequences import ContextShard, plan_layout
from anytron.traits import ModelTraits

LENGTHS = [3, 1, 4]
CAUSAL = ModelTraits()
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def layouts(format, cp=1, align=1, lengths=LENGTHS):
    return [
        plan_layout(lengths, format=format, tensor_parallel=align, shard=ContextShard(cp, rank)) for rank in range(cp)
    ]


def plain(mode):
    return AttnMask(MaskKind.NONE, mode)


def full(keep, polarity):
    return AttnMask(MaskKind.FULL_4D, "arbitrary", keep if polarity is Polarity.KEEP else ~keep, polarity)


def test_the_definition_by_hand():
    assert defined_pairs([2, 1], CAUSAL) == {(0, 0), (1, 0), (1, 1), (2, 2)}
    assert defined_pairs([2], ModelTraits(causal=False)) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert defined_pairs([3], ModelTraits(window=(1, 0))) == {(0, 0), (1, 0), (1, 1), (2, 1), (2, 2)}


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("window", [None, (1, 0)])
def test_transformer_engine_is_exact_with_causal_rows_and_with_padded_causal_packs(cp, window):
    traits = ModelTraits(window=window)
    expected = defined_pairs(LENGTHS, traits)
    assert read_transformer_engine(plain("causal"), layouts("bshd", cp), traits) == expected
    assert read_transformer_engine(plain("padding_causal"), layouts("thd", cp), traits) == expected


def test_without_causality_unmasked_rows_see_padding():
    traits = ModelTraits(causal=False)
    pairs = read_transformer_engine(plain("no_mask"), layouts("bshd"), traits)
    assert pairs - defined_pairs(LENGTHS, traits) == {(t, PADDING) for t in range(4)}, "the full row has none"


@pytest.mark.parametrize(
    ("mode", "format", "cp"),
    [("causal", "thd", 1), ("arbitrary", "bshd", 2), ("padding", "bshd", 2), ("bottom_left", "bshd", 1)],
)
def test_transformer_engine_refuses(mode, format, cp):
    with pytest.raises(ValueError, match=mode):
        read_transformer_engine(plain(mode), layouts(format, cp), CAUSAL)


@pytest.mark.parametrize("format", ["thd", "bshd"])
def test_flash_attention_is_exact_as_long_as_it_is_causal(format):
    pairs = read_flash_attention(plain("padding_causal"), layouts(format, align=2), CAUSAL)
    assert pairs == defined_pairs(LENGTHS, CAUSAL)


def test_flash_attention_knows_no_padding_and_no_masks():
    both_ways = ModelTraits(causal=False)
    seen = read_flash_attention(plain("padding"), layouts("thd", align=2), both_ways)
    assert any(key == PADDING for _, key in seen), "varlen knows the padded lengths only"
    with pytest.raises(ValueError, match="neither masks"):
        read_flash_attention(full(torch.ones(3, 1, 4, 4, dtype=torch.bool), Polarity.KEEP), layouts("bshd"), CAUSAL)


@pytest.mark.parametrize("format", ["thd", "bshd"])
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("sparse_mode", [2, 3])
def test_the_compressed_triangle_is_exact_on_npu(format, cp, sparse_mode):
    mask = AttnMask(MaskKind.COMPRESSED_CAUSAL, f"sparse_mode={sparse_mode}", TRIANGLE, Polarity.MASKED)
    assert read_npu_fusion_attention(mask, layouts(format, cp)) == defined_pairs(LENGTHS, CAUSAL)


def test_the_band_is_a_window_on_npu():
    mode = "sparse_mode=4,pre_tokens=1,next_tokens=0"
    mask = AttnMask(MaskKind.COMPRESSED_CAUSAL, mode, TRIANGLE, Polarity.MASKED)
    assert read_npu_fusion_attention(mask, layouts("thd")) == defined_pairs(LENGTHS, ModelTraits(window=(1, 0)))


def test_npu_sparse_mode_0_cuts_the_mask_with_its_window_and_mode_1_does_not():
    nothing = torch.zeros(1, 1, 3, 3, dtype=torch.bool)
    rows = layouts("bshd", lengths=[3])
    windowed = AttnMask(MaskKind.FULL_4D, "sparse_mode=0,next_tokens=0", nothing, Polarity.MASKED)
    assert read_npu_fusion_attention(windowed, rows) == defined_pairs([3], CAUSAL)
    whole = AttnMask(MaskKind.FULL_4D, "sparse_mode=1,next_tokens=0", nothing, Polarity.MASKED)
    assert read_npu_fusion_attention(whole, rows) == defined_pairs([3], ModelTraits(causal=False))


def test_npu_without_a_mask_ignores_its_sparse_mode():
    """Mode 2 without the triangle is not causal: the documentation says mode and windows are ignored."""
    pairs = read_npu_fusion_attention(plain("sparse_mode=2"), layouts("bshd", lengths=[2]))
    assert pairs == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_a_full_mask_under_sparse_mode_2_breaks_the_contract_of_the_npu():
    """verl hands ``[B, 1, S, S]`` to MindSpeed, which reads it with ``sparse_mode=2`` (divergence, bug 7)."""
    mask = AttnMask(MaskKind.FULL_4D, "sparse_mode=2", torch.zeros(3, 1, 4, 4, dtype=torch.bool), Polarity.MASKED)
    with pytest.raises(ValueError, match="compressed upper triangle"):
        read_npu_fusion_attention(mask, layouts("bshd"))
    with pytest.raises(ValueError, match="no sparse_mode"):
        read_npu_fusion_attention(plain("sparse_mode=6"), layouts("bshd"))
    with pytest.raises(ValueError, match="rows on one rank"):
        read_npu_fusion_attention(
            AttnMask(MaskKind.FULL_4D, "sparse_mode=1", mask.tensor, Polarity.MASKED), layouts("bshd", 2)
        )


@pytest.mark.parametrize("polarity", list(Polarity))
def test_a_full_mask_reads_the_same_in_either_declared_polarity(polarity):
    position = torch.arange(4)
    real = position[None] < torch.tensor(LENGTHS)[:, None]
    keep = (real[:, :, None] & real[:, None, :] & (position[None, :, None] >= position[None, None, :]))[:, None]
    mask = full(keep, polarity)
    expected = defined_pairs(LENGTHS, CAUSAL)
    assert read_sdpa(mask, layouts("bshd")) == expected
    assert read_transformer_engine(mask, layouts("bshd"), CAUSAL) == expected


def test_sdpa_causal_rows():
    assert read_sdpa(plain("causal"), layouts("bshd")) == defined_pairs(LENGTHS, CAUSAL)
    with pytest.raises(ValueError, match="rows on one rank"):
        read_sdpa(plain("causal"), layouts("thd"))
