"""What went wrong in other trainers around the hooks of a micro-batch, one test for each.

Numbers as in ``tests/core/sequences/test_bugs_elsewhere.py``. Run by ``test_bugs_elsewhere.py`` in a
process of its own, because Megatron is imported here.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state

from anytron import hookimpl
from anytron.base.errors import DataError, EngineError
from anytron.base.traits import ModelTraits, ParallelSizes
from anytron.device.loading import hooks_of
from anytron.sequences import scopes
from anytron.sequences.batch import RaggedBatch
from anytron.sequences.layout import ContextShard, LayoutConstraints
from anytron.sequences.masks import MaskKind
from anytron.task.data.images import ImagePatches
from anytron_megatron.training.heads import TokenScoreHead
from anytron_megatron.training.micro_batch import BatchPreparer
from anytron_megatron.training.vision import VisionInputs

LENGTHS = [5, 2, 7]


class Recorder:
    """A plugin that notes what it is asked, and a device that keeps lengths globally."""

    def __init__(self) -> None:
        self.inputs, self.mask_requests, self.device_lengths = [], [], None

    @hookimpl
    def preprocess_sequences(self, inputs):
        self.inputs.append(inputs)
        lengths = inputs.layout.cu_seqlens_padded.diff().tolist()

        @contextlib.contextmanager
        def scope():
            self.device_lengths = lengths
            yield
            self.device_lengths = None

        return replace(inputs, scope=scopes.combine(inputs.scope, scope))

    @hookimpl
    def build_attn_mask(self, request):
        self.mask_requests.append(request)


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def preparer(recorder):
    return text_preparer(recorder, "thd")


def text_preparer(recorder, sequence_format):
    return BatchPreparer(
        hooks_of(extensions={"recorder": recorder}),
        sequence_format=sequence_format,
        traits=ModelTraits(),
        accepted=frozenset({MaskKind.NONE}),
        sizes=ParallelSizes(tensor=2),
        shard=ContextShard(),
        device=torch.device("cpu"),
        context_length=4096,
        portable=True,
        constraints=LayoutConstraints(bucket=32),
    )


def batch(lengths):
    total = sum(lengths)
    return RaggedBatch(torch.tensor(lengths), torch.arange(total), torch.ones(total, dtype=torch.bool))


IMAGE = ImagePatches(torch.ones(4, 6), torch.tensor([[1, 2, 2]]))


def batch_with_an_image():
    tokens = torch.tensor([1, 2, 9, 3, 4, 5, 6])
    return RaggedBatch(torch.tensor([2, 5]), tokens, torch.zeros(7, dtype=torch.bool), images=(None, IMAGE))


def vision_preparer(recorder, sequence_format, shard):
    return BatchPreparer(
        hooks_of(extensions={"recorder": recorder}),
        sequence_format=sequence_format,
        traits=ModelTraits(vision=True),
        accepted=frozenset({MaskKind.NONE}),
        sizes=ParallelSizes(context=shard.size),
        shard=shard,
        device=torch.device("cpu"),
        context_length=4096,
        portable=True,
        constraints=LayoutConstraints(bucket=32),
        vision=VisionInputs(image_token=9, video_token=8, merge=2, patch_values=6),
    )


def test_1_lengths_given_to_the_device_are_those_after_the_last_padding(preparer, recorder):
    """MindSpeed got the lengths before the bucket extended the last sequence; attention ran over others."""
    prepared = preparer.prepare(batch(LENGTHS))
    with scopes.enter(prepared.inputs.scope):
        assert recorder.device_lengths == [6, 2, 24]
        assert sum(recorder.device_lengths) == prepared.inputs.input_ids.shape[1] == 32
        assert prepared.packed.cu_seqlens_q_padded.diff().tolist() == recorder.device_lengths


def test_2_the_device_is_told_once_per_micro_batch(preparer, recorder):
    """It was told for ids, labels, temperatures and loss mask each, with 2B host copies every time."""
    for count, lengths in enumerate([LENGTHS, [3], [4, 4]], start=1):
        preparer.prepare(batch(lengths))
        assert len(recorder.inputs) == count


def test_2_what_the_device_was_told_ends_with_its_micro_batch(preparer, recorder):
    """A process global outlived its micro-batch: a recomputation read the lengths of a later one."""
    first, second = preparer.prepare(batch([3])), preparer.prepare(batch([9]))
    assert recorder.device_lengths is None, "nothing is set outside of a pass"
    with scopes.enter(first.inputs.scope):
        recompute = scopes.rescoped(lambda: list(recorder.device_lengths))
        assert recorder.device_lengths == [32]
    first_lengths = first.inputs.layout.padded_lengths.tolist()
    with scopes.enter(second.inputs.scope):
        assert recompute() == first_lengths
    assert recorder.device_lengths is None


def test_3_the_mask_is_built_once_and_only_for_ids(preparer, recorder):
    """``[B, 1, S, S]`` was built for labels, temperatures and loss masks too, and dropped."""
    assert [request.layout for request in recorder.mask_requests] == [None], "once when the engine is built"
    prepared = preparer.prepare(batch(LENGTHS))
    assert [request.layout for request in recorder.mask_requests[1:]] == [prepared.inputs.layout]


@pytest.mark.parametrize("sequence_format", ["thd", "bshd"])
def test_a_prompt_costs_no_product_with_the_vocabulary(recorder, sequence_format, monkeypatch):
    """verl and others make the logits of whole sequences, and drop those of the prompts."""
    preparer = text_preparer(recorder, sequence_format)
    prompts = torch.tensor([1, 1, 1, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 0], dtype=torch.bool)
    prepared = preparer.prepare(replace(batch(LENGTHS), response_mask=~prompts))
    seen = []

    def kernel(hidden, weight, labels, temperature, group):
        seen.append((hidden, labels))
        return labels.float(), 2.0 * labels

    layer = SimpleNamespace(weight=torch.ones(3, 2), sequence_parallel=False)
    head = TokenScoreHead(layer, kernel)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_group", lambda: None)
    monkeypatch.setattr(head, "_on_every_rank", lambda hidden: hidden)
    rows, columns = prepared.inputs.layout.shape
    hidden = torch.arange(rows * columns * 2.0).view(columns, rows, 2)
    with scopes.enter(head.scope(prepared)):
        answers, _ = layer.forward(hidden)
    ((scored, labels),) = seen
    assert sorted(labels.tolist()) == [3, 4, 6, 13]
    flat = preparer.postprocess(answers.transpose(0, 1), prepared)
    outputs = head.token_outputs(flat, prepared)
    expected = torch.where(prompts, 0.0, torch.arange(14.0))
    assert torch.equal(outputs.log_probs, expected)
    assert torch.equal(outputs.entropy, 2 * expected)
    before = {int(label): row for label, row in zip(labels, scored, strict=True)}
    states = prepared.inputs.layout.unpack(hidden.transpose(0, 1))
    assert all(torch.equal(before[token], states[token - 1]) for token in before)


def test_log_probs_that_are_rounded_are_refused(recorder, monkeypatch):
    prepared = text_preparer(recorder, "thd").prepare(batch(LENGTHS))

    def kernel(hidden, weight, labels, temperature, group):
        return labels.float(), labels.bfloat16()

    layer = SimpleNamespace(weight=torch.ones(3, 2), sequence_parallel=False)
    head = TokenScoreHead(layer, kernel)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_group", lambda: None)
    monkeypatch.setattr(head, "_on_every_rank", lambda hidden: hidden)
    rows, columns = prepared.inputs.layout.shape
    with (
        scopes.enter(head.scope(prepared)),
        pytest.raises(EngineError, match=r"returned torch\.float32 and torch\.bfloat16"),
    ):
        layer.forward(torch.zeros(columns, rows, 2))


@pytest.mark.parametrize("sequence_format", ["thd", "bshd"])
def test_5904_no_mask_reaches_a_vision_model_and_the_map_of_real_tokens_stays(recorder, sequence_format):
    """Rows of a vision model came with a 2-D map, which the device's kernel read as a mask."""
    preparer = vision_preparer(recorder, sequence_format, ContextShard())
    prepared = preparer.prepare(batch_with_an_image())
    assert all(request.traits.vision for request in recorder.mask_requests)
    assert prepared.attention_mask is None
    assert int(prepared.inputs.layout.valid.sum()) == 7


@pytest.mark.parametrize("sequence_format", ["thd", "bshd"])
def test_a_vision_model_gets_whole_ids_and_its_own_positions(recorder, sequence_format):
    """It shards ids itself, at cu_seqlens_q: without padding, shards would be cut elsewhere than the layout's."""
    preparer = vision_preparer(recorder, sequence_format, ContextShard(2, 1))
    prepared = preparer.prepare(batch_with_an_image())
    layout, inputs = prepared.inputs.layout, prepared.inputs
    assert inputs.input_ids.shape == layout.taken.shape == inputs.extra["mm_token_type_ids"].shape
    assert inputs.position_ids.shape == (3, *layout.shape)
    assert 2 * inputs.position_ids.shape[-1] == inputs.input_ids.shape[-1]
    if sequence_format == "thd":
        assert prepared.packed.cu_seqlens_q.tolist() == layout.cu_seqlens_padded.tolist() != layout.cu_seqlens.tolist()


@pytest.mark.parametrize(
    ("sequence_format", "padded"), [("thd", [16, 16, 224]), ("bshd", [256, 256, 256])], ids=["thd", "bshd"]
)
def test_a_model_that_computes_in_fp8_gets_whole_blocks_of_tokens(sequence_format, padded):
    """Only the layout's own tests asked for FP8's padding; a model in FP8 was given the layout of any other."""

    def lengths(*, fp8):
        preparer = BatchPreparer(
            hooks_of(extensions={}),
            sequence_format=sequence_format,
            traits=ModelTraits(),
            accepted=frozenset({MaskKind.NONE}),
            sizes=ParallelSizes(tensor=2),
            shard=ContextShard(),
            device=torch.device("cpu"),
            context_length=4096,
            portable=True,
            fp8=fp8,
        )
        return preparer.prepare(batch(LENGTHS)).inputs.layout.padded_lengths.tolist()

    assert lengths(fp8=True) == padded
    assert lengths(fp8=False) != padded


def test_images_that_no_part_of_the_model_takes_are_refused(preparer):
    with pytest.raises(DataError, match="does not accept images"):
        preparer.prepare(batch_with_an_image())
