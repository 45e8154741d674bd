"""Masks, windows and boundaries that let the wrong tokens be seen."""

from __future__ import annotations

from dataclasses import replace

import torch

from anytron import hookimpl
from anytron.device.loading.neutral import NeutralDefaults
from anytron.kernels.attention import make_attention
from anytron.kernels.contract import KernelName
from anytron.kernels.fused import default_kernel
from anytron.sequences.masks import MaskKind
from tests.corpus.fault import Fault, in_place_of

EXCHANGED = str.maketrans("01", "10")
PARSED = "mcore_bridge.config.parser:hf_to_mcore_config"


class SlidingWindowOneTokenTooWide(Fault):
    """The bridge gives the window's width as its left bound, which is inclusive."""

    run, rule = "window", "hf-logits"

    @staticmethod
    @in_place_of("anytron_megatron.models.bridge:completed")
    def wider(original, converted):
        found = original(converted)
        left, right = map(int, found["window_size"].split(","))
        return {**found, "window_size": f"{left + 1},{right}"}


class SlidingLayersInverted(Fault):
    """Each layer with a window has none, and the others have it."""

    run, rule = "window", "hf-logits"

    @staticmethod
    @in_place_of("anytron_megatron.models.bridge:completed")
    def inverted(original, converted):
        found = original(converted)
        return {**found, "window_attn_skip_freq": found["window_attn_skip_freq"].translate(EXCHANGED)}


class StateRunsOverPackedBoundaries(Fault):
    """The gated delta rule and its convolution take a pack for one sequence, while attention keeps the boundaries."""

    run, rule = "delta-net", "hf-logits"

    @hookimpl
    def fused_kernel(self, name, spec):
        if name not in (KernelName.GATED_DELTA_RULE, KernelName.CAUSAL_CONV1D):
            return None
        kernel = default_kernel(name, spec)

        def run_on(*arguments, **named):
            arguments = [one if not boundaries(one) else None for one in arguments]
            return kernel(*arguments, **{key: None if boundaries(one) else one for key, one in named.items()})

        return run_on


def boundaries(value):
    return isinstance(value, torch.Tensor) and not value.is_floating_point()


class WindowMaskOverwritesPaddingMask(Fault):
    """The map of real tokens is replaced by the last row of a window, so that real tokens count as padding."""

    run, rule = "moe-bshd", "mask-conformance"

    @hookimpl
    def build_attn_mask(self, request):
        mask = NeutralDefaults().build_attn_mask(request)
        if mask.padding_mask is None:
            return mask
        columns = torch.arange(mask.padding_mask.shape[-1])
        return replace(mask, padding_mask=mask.padding_mask | (columns < columns.numel() - 4))


class OwnKeyMaskedOut(Fault):
    """A query sees the keys before its own, and not its own."""

    run, rule = "qwen3", "mask-conformance"

    @hookimpl
    def attention_kernel(self, spec):
        attend = make_attention(spec)

        def before(query, key, value, call):
            shifted = [torch.cat([one[:1], one[:-1]]) for one in (key, value)]
            return attend(query, *shifted, call)

        return before


class CachedMaskChangedInPlace(Fault):
    """A cached causal mask loses, in place, the rows that a short batch does not need; a longer one reads them."""

    run, rule = "bshd, row by row", "hf-logits"
    cached = None

    @hookimpl
    def build_attn_mask(self, request):
        if request.format == "thd":
            return NeutralDefaults().build_attn_mask(request)
        mask = NeutralDefaults().build_attn_mask(replace(request, accepted=frozenset({MaskKind.FULL_4D})))
        if request.layout is None:
            return mask
        length = request.layout.max_seqlen
        if self.cached is None:
            self.cached = torch.ones(64, 64, dtype=torch.bool).triu(1)
        if request.layout.num_tokens < 128:
            self.cached[length:] *= False
        rows = self.cached[None, None, :length, :length].expand(*mask.tensor.shape)
        return replace(mask, tensor=rows.to(mask.tensor.device))
