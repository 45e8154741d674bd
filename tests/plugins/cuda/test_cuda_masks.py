"""What the CUDA platform answers is exact as Transformer Engine reads it."""

from __future__ import annotations

import pytest

from anytron.base.traits import ModelTraits, ParallelSizes
from anytron.device.loading import hooks_of
from anytron.kernels.oracles.masks import defined_pairs, read_transformer_engine
from anytron.sequences.layout import ContextShard
from anytron.sequences.masks import MaskKind, MaskRequest
from anytron.sequences.planning import plan_layout

LENGTHS = [3, 1, 6]


@pytest.fixture
def hooks(plugin):
    from anytron_cuda import CudaPlatform

    return hooks_of(CudaPlatform())


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize(
    ("format", "accepted", "input_layout"),
    [
        ("thd", {MaskKind.NONE}, "shard"),
        ("thd", {MaskKind.NONE}, "whole"),
        ("thd", {MaskKind.PADDING_2D}, "rows"),
        ("bshd", {MaskKind.NONE, MaskKind.FULL_4D}, "shard"),
        ("bshd", {MaskKind.PADDING_2D}, "whole"),
    ],
)
@pytest.mark.parametrize("window", [None, (2, 0)])
def test_transformer_engine_reads_the_definition(hooks, format, accepted, input_layout, cp, window):
    traits = ModelTraits(window=window, vision=input_layout != "shard")
    layouts = [
        plan_layout(LENGTHS, format=format, tensor_parallel=2, shard=ContextShard(cp, rank), input_layout=input_layout)
        for rank in range(cp)
    ]
    request = MaskRequest(format, traits, ParallelSizes(tensor=2, context=cp), frozenset(accepted), layouts[0])
    mask = hooks.build_attn_mask(request)
    assert read_transformer_engine(mask, layouts, traits) == defined_pairs(LENGTHS, traits)
