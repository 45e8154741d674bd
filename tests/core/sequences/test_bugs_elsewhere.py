"""What went wrong in other trainers and cannot go wrong here, one test for each.

The numbers are those of section 6 of the survey of verl, ms-swift and mcore-bridge that this project
began with; each docstring says what happened there. Those that need an engine are in
``tests/backends/megatron/test_bugs_elsewhere.py``.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from anytron.base.errors import HookContractError
from anytron.base.traits import ModelTraits, ParallelSizes
from anytron.device.hooks.registry import specifications
from anytron.device.loading import hooks_of
from anytron.kernels.contract import AttentionCall, AttentionSpec
from anytron.kernels.oracles.masks import defined_pairs, read_transformer_engine
from anytron.sequences.layout import ContextShard, LayoutConstraints
from anytron.sequences.masks import AttnMask, MaskKind, MaskRequest, Polarity, check_mask
from anytron.sequences.planning import plan_layout

LENGTHS = [5, 2, 7]


def shards(cp, **arguments):
    return [plan_layout(LENGTHS, shard=ContextShard(cp, rank), **arguments) for rank in range(cp)]


def request_for(layout, accepted, traits=None):
    parallel = ParallelSizes(context=layout.shard.size)
    return MaskRequest(layout.format, traits or ModelTraits(), parallel, frozenset(accepted), layout)


def test_1_the_lengths_of_a_layout_are_those_after_the_last_padding():
    """MindSpeed was given lengths before FP8 and buckets extended the last sequence; the model ran with others."""
    for fp8, bucket in itertools.product([False, True], [1, 96]):
        layout = plan_layout(LENGTHS, fp8=fp8, constraints=LayoutConstraints(bucket=bucket))
        assert int(layout.cu_seqlens_padded[-1]) == layout.shape[1], "no padding after the lengths"
        assert layout.cu_seqlens_padded.diff().tolist() == layout.padded_lengths.tolist()


def test_4_what_is_real_is_not_asked_of_a_mask():
    """After the model, verl took the diagonal of whatever mask had gone in; where that was None it failed (#5904)."""
    assert specifications()["postprocess_output"].arguments == ("values", "layout")
    tokens = torch.arange(14.0)
    layout = plan_layout(LENGTHS, format="bshd", tensor_parallel=4)
    for accepted in ({MaskKind.NONE}, {MaskKind.FULL_4D}, {MaskKind.PADDING_2D}):
        hooks_of().build_attn_mask(request_for(layout, accepted))
        assert torch.equal(hooks_of().postprocess_output(layout.pack(tokens, fill=-1.0), layout), tokens)


@pytest.mark.parametrize("cp", [2, 4])
def test_5_a_square_mask_over_the_local_zigzag_is_refused(cp):
    """verl gave ring attention ``[B, 1, S/cp, S/cp]``: which of the *other* ranks' keys a query sees was not in it."""
    layout = shards(cp, format="bshd")[0]
    rows, columns = layout.shape
    local = torch.zeros(rows, 1, columns, columns, dtype=torch.bool)
    mask = AttnMask(MaskKind.FULL_4D, "arbitrary", local, Polarity.MASKED)
    with pytest.raises(HookContractError, match="must have the shape of its kind"):
        check_mask(mask, request_for(layout, {MaskKind.FULL_4D}), None, "toy")
    with pytest.raises(HookContractError, match="cannot build a mask that this model accepts") as refusal:
        hooks_of().build_attn_mask(request_for(layout, {MaskKind.FULL_4D}))
    assert f"context-parallel size {cp}" in refusal.value.where


@pytest.mark.parametrize("format", ["thd", "bshd"])
@pytest.mark.parametrize("cp", [1, 2])
def test_8_ids_and_labels_of_a_vision_model_are_aligned_alike_in_fp8(format, cp):
    """The vision path left out FP8's alignment, the label path had it: logits and labels differed in shape."""
    for layout in shards(cp, format=format, fp8=True, input_layout="whole"):
        labels = layout.next_tokens(torch.arange(14))
        rows, columns = layout.taken.shape
        assert (rows, columns) == (labels.shape[0], labels.shape[1] * cp)
        assert rows * columns % 128 == 0


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    cp=st.sampled_from([2, 4]),
    fp8=st.booleans(),
    bucket=st.sampled_from([1, 40, 64]),
)
def test_9_zigzag_chunks_of_a_last_sequence_that_was_extended(lengths, cp, fp8, bucket):
    """The first chunk was not cut off at the sequence's end: an error, or one token spread over all of it."""
    tokens = torch.arange(1, sum(lengths) + 1)
    constraints = LayoutConstraints(bucket=bucket)
    for rank in range(cp):
        layout = plan_layout(lengths, shard=ContextShard(cp, rank), fp8=fp8, constraints=constraints)
        expected = []
        for sequence, padded in zip(tokens.split(lengths), layout.padded_lengths.tolist(), strict=True):
            chunks = torch.nn.functional.pad(sequence, (0, padded - len(sequence))).chunk(2 * cp)
            expected += [chunks[rank], chunks[2 * cp - 1 - rank]]
        assert torch.equal(layout.pack(tokens)[0], torch.cat(expected))


def test_10_a_keep_mask_does_not_reach_a_kernel_that_reads_masked():
    """verl's keep mask went to Megatron, which reads True as forbidden; that nothing broke was Transformer Engine
    not looking at it."""
    layout = plan_layout(LENGTHS, format="bshd")
    answer = hooks_of().build_attn_mask(request_for(layout, {MaskKind.FULL_4D}))
    right = defined_pairs(LENGTHS, ModelTraits())
    as_keep = dataclasses.replace(answer, tensor=~answer.tensor, polarity=Polarity.KEEP)
    assert torch.equal(as_keep.for_model(), answer.for_model())
    assert read_transformer_engine(as_keep, [layout], ModelTraits()) == right
    mislabelled = dataclasses.replace(answer, polarity=Polarity.KEEP)
    assert read_transformer_engine(mislabelled, [layout], ModelTraits()) != right, "the readers tell them apart"


def test_14_a_kernel_for_other_value_heads_changes_nothing_but_its_answer():
    """For MLA verl wrote the padded value size into the attention module and never took it back."""
    spec = AttentionSpec(2, 2, 6, 4, 6**-0.5, ModelTraits(latent_attention=True))
    before = dataclasses.asdict(spec)
    kernel = hooks_of().attention_kernel(spec)
    query, key, value = torch.randn(7, 2, 6), torch.randn(7, 2, 6), torch.randn(7, 2, 4)
    cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
    call = AttentionCall("thd", "padding_causal", cu_seqlens, cu_seqlens, cu_seqlens, cu_seqlens, 4, 4)
    versions = [tensor._version for tensor in (query, key, value, cu_seqlens)]
    assert kernel(query, key, value, call).shape == (7, 2, 4)
    assert dataclasses.asdict(spec) == before
    assert [tensor._version for tensor in (query, key, value, cu_seqlens)] == versions


def test_32_a_full_mask_has_the_keys_of_all_ranks():
    """ms-swift cut the queries of a 4-D mask for context parallelism and left the keys: what were they then?
    Here the contract says it: this rank's queries, every rank's keys."""
    layout = shards(2, format="bshd")[1]
    rows, columns = layout.shape
    request = request_for(layout, {MaskKind.FULL_4D})

    def answer(*shape):
        return AttnMask(MaskKind.FULL_4D, "toy", torch.zeros(shape, dtype=torch.bool), Polarity.MASKED)

    check_mask(answer(rows, 1, columns, 2 * columns), request, None, "toy")
    for wrong in ((rows, 1, columns, columns), (rows, 1, 2 * columns, 2 * columns)):
        with pytest.raises(HookContractError, match="must have the shape of its kind"):
            check_mask(answer(*wrong), request, None, "toy")


def test_33_every_map_of_one_micro_batch_agrees_on_what_is_padding():
    """The 2-D map was made from lengths after context parallelism's padding, the 4-D mask from those before."""
    layout = plan_layout(LENGTHS, format="bshd", tensor_parallel=4)
    traits = ModelTraits(linear_attention=True, mixture_of_experts=True)
    full = hooks_of().build_attn_mask(request_for(layout, {MaskKind.FULL_4D}, traits))
    flat = hooks_of().build_attn_mask(request_for(layout, {MaskKind.PADDING_2D}, traits))
    assert torch.equal(flat.tensor, layout.valid)
    assert torch.equal(~full.tensor[:, 0].diagonal(dim1=-2, dim2=-1), layout.valid)
    assert torch.equal(full.linear_attn_mask, layout.valid)
    assert torch.equal(~full.padding_mask, layout.valid)


class LargestTensor(TorchDispatchMode):
    """Remember the largest tensor that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize("format", ["thd", "bshd"])
def test_34_no_square_mask_is_built_to_be_thrown_away(format):
    """ms-swift's collator built ``[B, 1, S, S]`` for every batch and dropped it where it had no use."""
    layout = plan_layout([500, 300], format=format)
    traits = ModelTraits(linear_attention=True, mixture_of_experts=True)
    for accepted in (set(MaskKind), {MaskKind.PADDING_2D}):
        with LargestTensor() as largest:
            hooks_of().build_attn_mask(request_for(layout, accepted, traits))
        assert largest.numel <= 2 * 500


@pytest.mark.parametrize("format", ["thd", "bshd"])
@pytest.mark.parametrize("cp", [1, 2])
def test_35_routing_knows_padding_where_there_is_no_mask(format, cp):
    """MoE routing negated the attention mask, which was None with flash attention, and with context parallelism
    longer than the hidden states."""
    for layout in shards(cp, format=format, tensor_parallel=4):
        mask = hooks_of().build_attn_mask(request_for(layout, {MaskKind.NONE}, ModelTraits(mixture_of_experts=True)))
        assert mask.tensor is None
        assert tuple(mask.padding_mask.shape) == layout.shape
        assert torch.equal(mask.padding_mask, layout.pack(torch.zeros(14, dtype=torch.bool), fill=True))
