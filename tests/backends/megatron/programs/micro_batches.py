"""What went wrong in other trainers around the hooks of a micro-batch, one test for each.

Numbers as in ``tests/core/sequences/test_bugs_elsewhere.py``. Run by ``test_bugs_elsewhere.py`` in a
process of its own, because Megatron is imported here.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch

from anytron import hookimpl
from anytron.hooks.facade import Hooks
from anytron.masks import MaskKind, ModelTraits, ParallelSizes
from anytron.sequences import ContextShard, LayoutConstraints, scopes
from anytron.trainer.batch import RaggedBatch
from anytron_megatron.microbatch import BatchPreparer

LENGTHS = [5, 2, 7]


class Recorder:
    """A plugin that notes what it is asked, and a device that keeps lengths globally."""

    def __init__(self) -> None:
        self.inputs, self.mask_requests, self.device_lengths = [], [], None

    @hookimpl
    def layout_constraints(self, request):
        return LayoutConstraints(bucket=32)

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
    return BatchPreparer(
        Hooks.of(extensions={"recorder": recorder}),
        sequence_format="thd",
        traits=ModelTraits(),
        accepted=frozenset({MaskKind.NONE}),
        sizes=ParallelSizes(tensor=2),
        shard=ContextShard(),
        device=torch.device("cpu"),
        context_length=4096,
    )


def batch(lengths):
    total = sum(lengths)
    return RaggedBatch(torch.tensor(lengths), torch.arange(total), torch.ones(total, dtype=torch.bool))


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
