"""Attention kernels that are wrong in one way each."""

from __future__ import annotations

from dataclasses import replace

import torch

from anytron.kernels.attention import make_attention
from anytron.kernels.oracles.attention import attend_where
from anytron.sequences.masks import AttnMask, MaskKind, Polarity
from tests.conformance.kernel_mutant import KernelMutant


def around(
    change_call=lambda call: call, change_spec=lambda spec: spec, before=lambda *qkv: qkv, after=lambda out: out
):
    """Make ``attention`` of a platform: the neutral kernel, with what goes in and comes out changed."""

    def attention(self, spec):
        attend = make_attention(change_spec(spec))
        return lambda query, key, value, call: after(attend(*before(query, key, value), change_call(call)))

    return attention


def without(**fields):
    return lambda call: replace(call, **fields)


class ReadsAtRealOffsets(KernelMutant):
    rule, says = "attention-packed", "The output is wrong"
    attention = around(without(cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None))


class SeesItsNeighbours(KernelMutant):
    rule, says = "attention-packed", "The output is wrong"

    def attention(self, spec):
        attend = make_attention(spec)

        def kernel(query, key, value, call):
            if call.format == "thd":
                ends = [ends[[0, -1]] for ends in (call.cu_seqlens_q, call.cu_seqlens_kv)]
                call = replace(
                    call,
                    cu_seqlens_q=ends[0],
                    cu_seqlens_kv=ends[1],
                    cu_seqlens_q_padded=None,
                    cu_seqlens_kv_padded=None,
                )
            return attend(query, key, value, call)

        return kernel


class TakesItsOwnScale(KernelMutant):
    rule, says = "attention-packed", "The output is wrong"
    attention = around(change_spec=lambda spec: replace(spec, scale=spec.qk_dim**-0.5))


class AnswersInFloat32(KernelMutant):
    rule, says = "attention-packed", "The output has the wrong dtype"
    attention = around(after=torch.Tensor.float)


class SeesTheFuture(KernelMutant):
    rule, says = "attention-padded", "The output is wrong"
    attention = around(lambda call: replace(call, mode="no_mask") if call.mode == "causal" else call)


class NegatesTheMask(KernelMutant):
    rule, says = "attention-masks", "The output is wrong"
    attention = around(lambda call: call if call.mask is None else replace(call, mask=~call.mask))


class IgnoresTheMaskIfCausal(KernelMutant):
    rule, says = "attention-masks", "The output is wrong"
    attention = around(
        lambda call: (
            replace(call, mode="causal", mask=None) if (call.format, call.mode) == ("bshd", "padding_causal") else call
        )
    )


class BlindRowsAreNaN(KernelMutant):
    rule, says = "attention-masks", "it is nan"

    def attention(self, spec):
        attend = make_attention(spec)

        def kernel(query, key, value, call):
            output = attend(query, key, value, call)
            if call.mask is None:
                return output
            blind = call.mask.all(-1).expand(-1, query.shape[2], query.shape[1]).transpose(1, 2)
            return output.masked_fill(blind[..., None], torch.nan)

        return kernel


class HeadsByRemainder(KernelMutant):
    rule, says = "attention-groups", "The output is wrong"

    def attention(self, spec):
        attend = make_attention(replace(spec, num_kv_heads=spec.num_heads))
        repeats = spec.num_heads // spec.num_kv_heads

        def kernel(query, key, value, call):
            key, value = (torch.cat([one] * repeats, dim=-2) for one in (key, value))
            return attend(query, key, value, call)

        return kernel


class GradientOfTheFirstHeadOnly(KernelMutant):
    rule, says = "attention-groups", "The gradient of the keys is wrong"

    def attention(self, spec):
        attend = make_attention(replace(spec, num_kv_heads=spec.num_heads))
        repeats = spec.num_heads // spec.num_kv_heads

        def spread(one):
            copies = [one, *[one.detach()] * (repeats - 1)]
            return torch.stack(copies, dim=-2).flatten(-3, -2)

        return lambda query, key, value, call: attend(query, spread(key), spread(value), call)


class CutsValuesToTheirKeys(KernelMutant):
    """Takes the size of queries for that of values, too."""

    rule, says = "attention-head-sizes", "heads of one size only"

    def attention(self, spec):
        attend = make_attention(spec)

        def kernel(query, key, value, call):
            assert value.shape[-1] == query.shape[-1], "heads of one size only"
            return attend(query, key, value, call)

        return kernel


class AnswersAsWideAsTheLayerSays(KernelMutant):
    """Cuts values that come padded to the size of queries."""

    rule, says = "attention-head-sizes", "The output has the wrong shape"

    def attention(self, spec):
        attend = make_attention(spec)
        return lambda query, key, value, call: attend(query, key, value[..., : spec.v_dim], call)


class ClaimsWindows(KernelMutant):
    rule, says = "attention-windows", "The output is wrong"
    attention = around(change_spec=lambda spec: replace(spec, traits=replace(spec.traits, window=None)))


class ExclusiveWindow(KernelMutant):
    rule, says = "attention-windows", "The output is wrong"
    attention = around(
        change_spec=lambda spec: (
            spec
            if spec.traits.window is None
            else replace(spec, traits=replace(spec.traits, window=(spec.traits.window[0] + 1, spec.traits.window[1])))
        )
    )


class ClaimsSinks(KernelMutant):
    rule, says = "attention-sinks", "The output is wrong"
    attention = around(without(sinks=None))


class SinksDoNotLearn(KernelMutant):
    rule, says = "attention-sinks", "The gradient of the sinks is missing"
    attention = around(lambda call: call if call.sinks is None else replace(call, sinks=call.sinks.detach()))


class TopLeftCausality(KernelMutant):
    rule, says = "attention-fewer-queries", "The output is wrong"

    def attention(self, spec):
        attend = make_attention(spec)

        def kernel(query, key, value, call):
            rows, columns = query.shape[1], key.shape[1]
            if (call.format, call.mode) != ("bshd", "causal") or rows == columns:
                return attend(query, key, value, call)
            later = torch.ones(rows, columns, dtype=torch.bool).triu(1)
            return attend(query, key, value, replace(call, mode="arbitrary", mask=later[None, None]))

        return kernel


class TakesQueriesForKeys(KernelMutant):
    rule, says = "attention-context-parallel", "The output is wrong"
    attention = around(
        lambda call: (
            call
            if call.format == "bshd"
            else replace(call, cu_seqlens_kv=call.cu_seqlens_q, cu_seqlens_kv_padded=call.cu_seqlens_q_padded)
        )
    )


class TimesZero(KernelMutant):
    """Hides pairs by weights of 0, over the whole buffer."""

    rule, says = "attention-poisoned-padding", "it is nan"

    def attention(self, spec):
        attend = make_attention(spec)

        def kernel(query, key, value, call):
            if call.format == "bshd" or spec.traits.window or call.sinks is not None:
                return attend(query, key, value, call)
            sides = []
            for rows, lengths, starts in (
                (len(query), call.cu_seqlens_q, call.cu_seqlens_q_padded),
                (len(key), call.cu_seqlens_kv, call.cu_seqlens_kv_padded),
            ):
                sequence, place = torch.full((rows,), -1), torch.zeros(rows, dtype=torch.int64)
                begins = (lengths if starts is None else starts).tolist()
                for number, length in enumerate(lengths.diff().tolist()):
                    chosen = slice(begins[number], begins[number] + length)
                    sequence[chosen], place[chosen] = number, torch.arange(length) - length
                sides.append((sequence[:, None], place[:, None]))
            (of_query, at_query), (of_key, at_key) = sides
            seen = (of_query == of_key.T) & (of_query >= 0)
            if "causal" in call.mode:
                seen &= at_query >= at_key.T
            return attend_where(query[None], key[None], value[None], seen, spec.scale)[0]

        return kernel


class IgnoresStrides(KernelMutant):
    rule, says = "attention-strides", "it is nan"

    @staticmethod
    def as_if_contiguous(one):
        strides = [1]
        for size in reversed(one.shape[1:]):
            strides.insert(0, strides[0] * size)
        return one.as_strided(one.shape, strides)

    attention = around(before=lambda *qkv: tuple(map(IgnoresStrides.as_if_contiguous, qkv)))


class Detached(KernelMutant):
    rule, says = "attention-packed", "The output has no gradient"
    attention = around(after=torch.Tensor.detach)


class KeysDoNotLearn(KernelMutant):
    rule, says = "attention-padded", "The gradient of the keys is missing"
    attention = around(before=lambda query, key, value: (query, key.detach(), value))


class WritesOverQueries(KernelMutant):
    rule, says = "attention-packed", "wrote over the queries"

    @staticmethod
    def scaled_in_place(query, key, value):
        query.data.mul_(1.25)
        return query, key, value

    attention = around(before=scaled_in_place.__func__, change_spec=lambda spec: replace(spec, scale=spec.scale / 1.25))


class RemembersLengths(KernelMutant):
    rule, says = "kernel-calls", "The output is wrong"

    def attention(self, spec):
        attend, known = make_attention(spec), []

        def kernel(query, key, value, call):
            if call.format == "thd":
                known.append(call)
                call = replace(known[0], sinks=call.sinks)
            return attend(query, key, value, call)

        return kernel


class ComputesElsewhere(KernelMutant):
    """Brings the operands to another device, as a fallback to the processor does. ``meta`` stands for it here."""

    rule, says = "kernel-devices", "computes on another device"

    @staticmethod
    def detour(*operands):
        for one in operands:
            one.to("meta")
        return operands

    attention = around(before=detour.__func__)


class Draws(KernelMutant):
    rule, says = "kernel-random-numbers", "generator has a different state"

    @staticmethod
    def drawing(output):
        torch.rand(1)
        return output

    attention = around(after=drawing.__func__)


class ClaimsDropout(KernelMutant):
    rule, says = "attention-dropout", "The weights are wrong"
    attention = around(without(dropout=0.0))


class DropsByItself(KernelMutant):
    """Draws from a generator of its own, which nobody can restore."""

    rule, says = "attention-dropout", "other weights were dropped"

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def attention(self, spec):
        attend = make_attention(spec)

        def kernel(query, key, value, call):
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self.generator.get_state())
                output = attend(query, key, value, call)
                self.generator.set_state(torch.get_rng_state())
            return output

        return kernel


class LiesAboutPolarity(KernelMutant):
    rule, says = "attention-own-mask", "The output is wrong"

    def mask(self, request):
        if MaskKind.FULL_4D not in request.accepted:
            return None
        if request.layout is None:
            return AttnMask(MaskKind.FULL_4D, "arbitrary")
        columns = request.layout.shape[1]
        seen = torch.ones(columns, columns, dtype=torch.bool).tril().expand(request.layout.shape[0], 1, -1, -1)
        return AttnMask(MaskKind.FULL_4D, "arbitrary", seen, Polarity.MASKED)


class ModeThatNobodyReads(KernelMutant):
    rule, says = "attention-own-mask", "does not support the kernel mode"

    def mask(self, request):
        return AttnMask(MaskKind.NONE, "acme_causal")


class NeedsMoreAlignmentThanItSays(KernelMutant):
    rule, says = "attention-own-mask", "The output is wrong"

    def attention(self, spec):
        attend = make_attention(spec)

        def kernel(query, key, value, call):
            if call.format == "bshd" and call.mode == "causal" and query.shape[0] > 1:
                whole = query.shape[1] // 8 * 8
                output = attend(query[:, :whole], key[:, :whole], value[:, :whole], call)
                return torch.nn.functional.pad(output, (0, 0, 0, 0, 0, query.shape[1] - whole))
            return attend(query, key, value, call)

        return kernel
