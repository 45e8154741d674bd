"""The readers of masks know right from wrong: each accepts what is exact and shows what is not."""

from __future__ import annotations

import pytest
import torch

from anytron.base.traits import ModelTraits
from anytron.kernels.oracles.masks import (
    PADDING,
    defined_pairs,
    read_flash_attention,
    read_transformer_engine,
)
from anytron.sequences.layout import ContextShard
from anytron.sequences.masks import AttnMask, MaskKind, Polarity
from anytron.sequences.planning import plan_layout

LENGTHS = [3, 1, 4]
CAUSAL = ModelTraits()


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


@pytest.mark.parametrize("polarity", list(Polarity))
def test_a_full_mask_reads_the_same_in_either_declared_polarity(polarity):
    position = torch.arange(4)
    real = position[None] < torch.tensor(LENGTHS)[:, None]
    keep = (real[:, :, None] & real[:, None, :] & (position[None, :, None] >= position[None, None, :]))[:, None]
    mask = full(keep, polarity)
    expected = defined_pairs(LENGTHS, CAUSAL)
    assert read_transformer_engine(mask, layouts("bshd"), CAUSAL) == expected
