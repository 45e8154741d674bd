"""Platforms that break layouts, micro-batches, scopes, masks, or the way back."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace

import torch

from anytron import hookimpl
from anytron.device.loading.neutral import NeutralDefaults
from anytron.kernels.attention import make_attention
from anytron.sequences import scopes
from anytron.sequences.layout import LayoutConstraints, gather_slots
from anytron.sequences.masks import MaskKind, Polarity
from tests.conformance import vendor
from tests.conformance.mutant import Mutant

NEUTRAL = NeutralDefaults()


class ChangingConstraints(Mutant):
    rule, says = "constraints-are-fixed", "at the second call"
    numbers = itertools.count(1)

    def layout_constraints(self, request):
        return LayoutConstraints(align=next(self.numbers))


class WithInputs(Mutant):
    def change(self, inputs):
        raise NotImplementedError

    @hookimpl
    def preprocess_sequences(self, inputs):
        return self.change(inputs)


class RollsLabels(WithInputs):
    rule, says = "inputs-keep-tokens", "labels of real tokens"

    def change(self, inputs):
        return replace(inputs, labels=inputs.labels.roll(1, -1))


class MovesPositions(WithInputs):
    rule, says = "inputs-keep-tokens", "real tokens must keep their positions"

    def change(self, inputs):
        return replace(inputs, position_ids=inputs.position_ids + 1)


class DropsToken(WithInputs):
    rule, says = "inputs-keep-tokens", "input_ids of real tokens"

    def change(self, inputs):
        return replace(inputs, input_ids=inputs.input_ids.masked_fill(inputs.position_ids == 1, 0))


class WritesInPlace(WithInputs):
    rule, says = "inputs-keep-tokens", "in place"

    def change(self, inputs):
        inputs.input_ids.add_(1)


class WithScope(WithInputs):
    def change(self, inputs):
        lengths = inputs.layout.lengths.tolist()
        return replace(inputs, scope=scopes.combine(inputs.scope, lambda: self.scope(lengths)))


class LeaksScope(WithScope):
    rule, says = "scopes-restore", "conformance.vendor.TOLD"

    @contextlib.contextmanager
    def scope(self, lengths):
        vendor.TOLD = lengths
        yield


class LeaksAfterErrors(WithScope):
    rule, says = "scopes-restore", "An error that leaves"

    @contextlib.contextmanager
    def scope(self, lengths):
        before, vendor.TOLD = vendor.TOLD, lengths
        yield
        vendor.TOLD = before


class ForgetsOuterScope(WithScope):
    rule, says = "scopes-nest", "inside of itself"

    @contextlib.contextmanager
    def scope(self, lengths):
        vendor.TOLD = lengths
        try:
            yield
        finally:
            vendor.TOLD = None


class WithOutput(Mutant):
    @hookimpl
    def postprocess_output(self, values, layout):
        if layout.shard.size == 1:
            return self.back(values, layout)
        return None


class Detaches(WithOutput):
    rule, says = "outputs-come-back", "No gradient flows back"

    def back(self, values, layout):
        return layout.unpack(values).detach()


class HalvesGradients(WithOutput):
    rule, says = "outputs-come-back", "gradients are wrong"

    def back(self, values, layout):
        flat = layout.unpack(values)
        return (flat + flat.detach()) / 2


class DropsLast(WithOutput):
    rule, says = "outputs-come-back", "one entry for each real token"

    def back(self, values, layout):
        return layout.unpack(values)[:-1]


class Reorders(WithOutput):
    rule, says = "outputs-come-back", "the value of another token"

    def back(self, values, layout):
        return layout.unpack(values).flip(0)


class GathersInAnotherOrder(Mutant):
    """The ranks' parts of a sequence in reverse."""

    rule, says = "context-parallel-outputs", "the value of another token"

    @hookimpl
    def postprocess_output(self, values, layout):
        shard = layout.shard
        if shard.size == 1:
            return None
        gather = gather_slots(shard.group)
        return layout.unpack(values, lambda slots: torch.cat(gather(slots).chunk(shard.size)[::-1]))


class WithMask(Mutant):
    @hookimpl
    def build_attn_mask(self, request):
        return self.mask(NEUTRAL.build_attn_mask(replace(request, accepted=self.accepted(request))), request)

    def accepted(self, request):
        return request.accepted


class MaskNegated(WithMask):
    rule, says = "mask-by-influence", "does not see token 0"

    def accepted(self, request):
        full = frozenset({MaskKind.FULL_4D})
        return full if MaskKind.FULL_4D in request.accepted else request.accepted

    def mask(self, mask, request):
        return mask if mask.tensor is None else replace(mask, polarity=Polarity.KEEP)


class CausalOffByOne(MaskNegated):
    rule, says = "mask-by-influence", "does not see"

    def mask(self, mask, request):
        if mask.tensor is None:
            return mask
        size = mask.tensor.shape[-1]
        return replace(mask, tensor=mask.tensor | torch.ones(size, size).triu(0).bool())


class MaskNotCausal(WithMask):
    rule, says = "mask-is-read", "Token 0 sees token 1"

    def mask(self, mask, request):
        return replace(mask, kernel_mode="padding") if mask.kernel_mode == "padding_causal" else mask


class RoutesPadding(WithMask):
    rule, says = "mask-companions", "padding_mask"

    def layout_constraints(self, request):
        return LayoutConstraints(align=4)

    def mask(self, mask, request):
        return replace(mask, padding_mask=None if mask.padding_mask is None else ~mask.padding_mask)


class PaddingInTheState(RoutesPadding):
    rule, says = "mask-companions", "linear_attn_mask"

    def mask(self, mask, request):
        if mask.linear_attn_mask is None:
            return mask
        return replace(mask, linear_attn_mask=torch.ones_like(mask.linear_attn_mask))


class WithKernel(Mutant):
    @hookimpl
    def attention_kernel(self, spec):
        attend = make_attention(spec)
        return lambda query, key, value, call: self.attend(attend, query, key, value, call)


class IgnoresBoundaries(WithKernel):
    rule, says = "mask-by-influence", "sees"

    def attend(self, attend, query, key, value, call):
        if call.format == "thd":
            ends = torch.tensor([0, len(query)], dtype=torch.int32)
            call = replace(
                call, cu_seqlens_q=ends, cu_seqlens_kv=ends, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None
            )
        return attend(query, key, value, call)


class ReadsPadding(WithKernel):
    rule, says = "padding-without-influence", "depends on the contents of padding"

    def layout_constraints(self, request):
        return LayoutConstraints(align=4)

    def attend(self, attend, query, key, value, call):
        return attend(query, key, value, call) + 0 * value.sum()


class LiesAboutAlignment(WithKernel):
    rule, says = "alignment-suffices", "lengths must be multiples of 16"

    def layout_constraints(self, request):
        return LayoutConstraints(align=8)

    def attend(self, attend, query, key, value, call):
        if call.format == "thd" and bool((call.cu_seqlens_q_padded % 16).any()):
            raise RuntimeError("lengths must be multiples of 16")
        return attend(query, key, value, call)


class WholeTilesOnly(LiesAboutAlignment):
    rule, says = "alignment-suffices", "The output of attention is wrong"

    def attend(self, attend, query, key, value, call):
        output = attend(query, key, value, call)
        if call.format == "thd":
            whole = (torch.arange(len(output)) < len(output) // 16 * 16)[:, None, None]
            output = output * whole
        return output


class NoGradient(WithKernel):
    rule, says = "padding-without-influence", "no gradient"

    def attend(self, attend, query, key, value, call):
        return attend(query, key, value, call).detach()
