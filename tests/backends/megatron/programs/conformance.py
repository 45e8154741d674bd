"""The conformance check passes what is right and fails what is broken, whatever the platform calls its modes.

Run by ``test_conformance.py`` in a process of its own, because Megatron is imported here. With WORLD_SIZE 2 the
sequences are split over two context-parallel ranks.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from anytron import hookimpl
from anytron.base.traits import AttentionHeads, ModelTraits, ParallelSizes
from anytron.device.loading import hooks_of
from anytron.device.loading.neutral import NeutralDefaults
from anytron.kernels.attention import make_attention
from anytron.sequences import scopes
from anytron.sequences.layout import ContextShard, LayoutConstraints
from anytron.sequences.masks import AttnMask, MaskKind, Polarity
from anytron_megatron.portable_te.binding import bind
from anytron_megatron.training.conformance import kernel_conformance, mask_conformance
from anytron_megatron.training.micro_batch import BatchPreparer

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
HEADS = AttentionHeads(4, 2, 8, 8)
KINDS = frozenset({MaskKind.NONE, MaskKind.FULL_4D}) if RANKS == 1 else frozenset({MaskKind.NONE})


@pytest.fixture(scope="module", autouse=True)
def shard():
    if RANKS == 1:
        yield ContextShard()
        return
    dist.init_process_group("gloo")
    yield ContextShard(RANKS, dist.get_rank(), group=dist.group.WORLD)
    dist.destroy_process_group()


@pytest.fixture
def judge(shard):
    """Check a platform: the largest difference, in the given formats."""

    def run(chip=None, formats=("thd", "bshd"), traits=ModelTraits(), heads=HEADS, dtype=torch.float32):  # noqa: B008 - immutable
        hooks = hooks_of(extensions={} if chip is None else {"chip": chip})
        sizes = ParallelSizes(context=RANKS)
        undo = bind(hooks, "cpu")
        try:
            preparers = [
                BatchPreparer(
                    hooks,
                    sequence_format=sequence_format,
                    traits=traits,
                    accepted=KINDS if sequence_format == "bshd" else frozenset({MaskKind.NONE}),
                    sizes=sizes,
                    shard=shard,
                    device=torch.device("cpu"),
                    context_length=64,
                    portable=True,
                    constraints=LayoutConstraints(align=4),
                )
                for sequence_format in formats
            ]
            device = torch.device("cpu")
            return kernel_conformance(preparers, heads=heads, sizes=sizes, dtype=dtype, device=device)
        finally:
            undo()

    return run


class Chip:
    """Full masks in bshd, and the reference kernel; its subclasses break either."""

    def mask(self, layout):
        """bool ``[B, 1, S, S]``, True = MASKED."""
        real = layout.valid[:, :, None] & layout.valid[:, None, :]
        return ~(real & (layout.position_ids[:, None] <= layout.position_ids[:, :, None]))[:, None]

    def attend(self, kernel, query, key, value, call):
        return kernel(query, key, value, call)

    @hookimpl
    def build_attn_mask(self, request):
        if MaskKind.FULL_4D not in request.accepted:
            return None
        if request.layout is None:
            return AttnMask(MaskKind.FULL_4D, "arbitrary")
        return AttnMask(MaskKind.FULL_4D, "arbitrary", self.mask(request.layout), Polarity.MASKED)

    @hookimpl
    def attention_kernel(self, spec):
        kernel = make_attention(spec)
        return lambda query, key, value, call: self.attend(kernel, query, key, value, call)


class OwnWords(Chip):
    """A platform with modes of its own, whose kernel insists on the lengths that its scope has set."""

    lengths = None

    @hookimpl
    def preprocess_sequences(self, inputs):
        @contextlib.contextmanager
        def scope():
            before, self.lengths = self.lengths, inputs.layout.lengths.tolist()
            try:
                yield
            finally:
                self.lengths = before

        return replace(inputs, scope=scopes.combine(inputs.scope, scope))

    @hookimpl
    def build_attn_mask(self, request):
        return replace(NeutralDefaults().build_attn_mask(request), kernel_mode=f"chip_{request.format}")

    def attend(self, kernel, query, key, value, call):
        assert self.lengths is not None, "the kernel was called outside of a micro-batch"
        assert call.mode == f"chip_{call.format}"
        return kernel(query, key, value, replace(call, mode={"thd": "padding_causal", "bshd": "causal"}[call.format]))


@pytest.mark.parametrize("chip", [None, Chip(), OwnWords()], ids=["neutral", "full masks", "modes of its own"])
@pytest.mark.parametrize("traits", [ModelTraits(), ModelTraits(window=(2, 0))], ids=["causal", "window"])
@pytest.mark.parametrize("heads", [HEADS, AttentionHeads(4, 4, 8, 6)], ids=["grouped", "other values"])
def test_what_is_right_passes(judge, chip, traits, heads):
    found = judge(chip, traits=traits, heads=heads)
    assert found.difference <= found.tolerance, found.detail


class OfOneDtype(Chip):
    """A kernel for bfloat16 only; beyond its rounding, its numbers are off by a factor."""

    def __init__(self, factor):
        self.factor = factor

    def attend(self, kernel, query, key, value, call):
        if query.dtype is not torch.bfloat16:
            raise TypeError("this chip computes in bfloat16")
        return kernel(query, key, value, call) * self.factor


@pytest.mark.parametrize("sequence_format", ["thd", "bshd"])
def test_operands_have_the_run_s_dtype(judge, sequence_format):
    right = judge(OfOneDtype(1), [sequence_format], dtype=torch.bfloat16)
    assert 1e-4 < right.difference <= right.tolerance == 0.05, right.detail
    assert right.detail.endswith("torch.bfloat16")
    found = judge(OfOneDtype(1.1), [sequence_format], dtype=torch.bfloat16)
    assert not found.difference <= found.tolerance, found.detail
    with pytest.raises(TypeError, match="in bfloat16"):
        judge(OfOneDtype(1), [sequence_format])


class NegatedMask(Chip):
    def mask(self, layout):
        return ~super().mask(layout)


class MaskOffByOne(Chip):
    def mask(self, layout):
        return super().mask(layout) & ~torch.ones(layout.shape[1], layout.shape[1], dtype=torch.bool).triu(1).tril(1)


class KernelReadsKeep(Chip):
    def attend(self, kernel, query, key, value, call):
        return kernel(query, key, value, call if call.mask is None else replace(call, mask=~call.mask))


class IgnoresBoundaries(Chip):
    def attend(self, kernel, query, key, value, call):
        ends = torch.tensor([0, len(query)], dtype=torch.int32)
        return kernel(query, key, value, replace(call, cu_seqlens_q=ends, cu_seqlens_kv=ends,
                                                 cu_seqlens_q_padded=ends, cu_seqlens_kv_padded=ends))  # fmt: skip


class ReadsAtRealOffsets(Chip):
    def attend(self, kernel, query, key, value, call):
        return kernel(query, key, value, replace(call, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None))


class NanInPadding(Chip):
    def attend(self, kernel, query, key, value, call):
        output = kernel(query, key, value, call)
        return output.masked_fill((output == 0).all(-1, keepdim=True), torch.nan)


class WrongMode(Chip):
    @hookimpl
    def build_attn_mask(self, request):
        return AttnMask(MaskKind.NONE, "padding" if request.format == "thd" else "no_mask")


class NoGradient(Chip):
    def attend(self, kernel, query, key, value, call):
        return kernel(query, key, value, call).detach()


class GradientTwice(Chip):
    def attend(self, kernel, query, key, value, call):
        output = kernel(query, key, value, call)
        return 2 * output - output.detach()


class FirstQueryAtFirstKey(Chip):
    """Causality from the top left corner, as SDPA's ``is_causal``: wrong where a chunk of queries comes late."""

    def attend(self, kernel, query, key, value, call):
        if call.format == "bshd" and query.shape[1] < key.shape[1]:
            later = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).triu(1)
            return kernel(query, key, value, replace(call, mode="arbitrary", mask=later[None, None]))
        return kernel(query, key, value, call)


BROKEN = [
    (IgnoresBoundaries, "thd"),
    (NanInPadding, "thd"),
    (WrongMode, "thd"),
    (GradientTwice, "thd"),
    (NoGradient, "bshd"),
]
if RANKS == 1:
    BROKEN += [
        (NegatedMask, "bshd"),
        (MaskOffByOne, "bshd"),
        (KernelReadsKeep, "bshd"),
        (WrongMode, "bshd"),
        (ReadsAtRealOffsets, "thd"),
    ]
else:
    BROKEN += [(FirstQueryAtFirstKey, "bshd")]


@pytest.mark.parametrize(("broken", "sequence_format"), BROKEN)
def test_what_is_broken_fails(judge, broken, sequence_format):
    assert judge(Chip(), [sequence_format]).difference <= 1e-4
    found = judge(broken(), [sequence_format])
    assert not found.difference <= found.tolerance, found.detail


def test_wrong_pairs_are_named(judge):
    detail = judge(WrongMode(), ["thd"]).detail
    assert re.match(r"thd 'padding' has \d+ wrong pairs of tokens, such as \d+ and \d+", detail), detail


class RoutesPadding:
    """Marks what is real as padding, in the map that routers read."""

    @hookimpl
    def build_attn_mask(self, request):
        mask = NeutralDefaults().build_attn_mask(request)
        return replace(mask, padding_mask=None if mask.padding_mask is None else ~mask.padding_mask)


@pytest.mark.parametrize("sequence_format", ["thd", "bshd"])
def test_maps_of_padding_are_compared_with_the_layout(judge, sequence_format):
    traits = ModelTraits(mixture_of_experts=True)
    found = judge(RoutesPadding(), formats=(sequence_format,), traits=traits)
    assert found.difference == 1.0
    assert "attends as defined" in found.detail
    assert "but padding_mask does not match the layout" in found.detail
    right = judge(formats=(sequence_format,), traits=traits)
    assert right.difference <= right.tolerance, right.detail


def test_a_vendors_mask_is_read_by_its_own_reader(shard):
    asked = []

    class Vendor:
        @hookimpl
        def build_attn_mask(self, request):
            def read(mask, layouts, traits):
                asked.append((mask.kernel_mode, len(layouts)))
                return set()

            return AttnMask(MaskKind.NONE, "vendor_band", reader=read)

    preparer = BatchPreparer(
        hooks_of(extensions={"vendor": Vendor()}),
        sequence_format="thd",
        traits=ModelTraits(),
        accepted=frozenset({MaskKind.NONE}),
        sizes=ParallelSizes(),
        shard=shard,
        device=torch.device("cpu"),
        context_length=64,
        portable=False,
    )
    found = mask_conformance(preparer, ParallelSizes())
    assert asked == [("vendor_band", 1)]
    assert found.difference == 71
