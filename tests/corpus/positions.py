"""Positions, angles and rotations that are not the model's."""

from __future__ import annotations

import torch

from anytron import hookimpl
from anytron.kernels.contract import KernelName
from anytron.kernels.fused import rope
from tests.corpus.fault import Fault, in_place_of


class RotaryFault(Fault):
    """Has another rotary kernel."""

    def rotate(self, x, freqs, interleaved):
        raise NotImplementedError

    @hookimpl
    def fused_kernel(self, name, spec):
        return self.rotate if name is KernelName.ROPE else None


class SineReadAtThePaddedWidth(RotaryFault):
    """The sines are read a few entries too late, if the rotary width is no power of two."""

    run, rule = "rotary-of-12", "hf-logits"

    def rotate(self, x, freqs, interleaved):
        width = freqs.shape[-1]
        if width & (width - 1) == 0:
            return rope(x, freqs, interleaved)
        other = torch.atan2(freqs.sin().roll(-2, -1), freqs.cos())
        return rope(x, other, interleaved)


class WholeHeadRotatedOfAPartialRope(RotaryFault):
    """All entries of a head are rotated, where a model rotates a part of them."""

    run, rule = "partial-rotary", "hf-logits"

    def rotate(self, x, freqs, interleaved):
        times = x.shape[-1] // freqs.shape[-1]
        return rope(x, freqs.repeat(*[1] * (freqs.dim() - 1), times), interleaved)


class LinearRopeScalingDroppedAtImport(Fault):
    """The bridge builds a checkpoint with linear rope scaling without any."""

    run, rule = "linear-rope", "hf-logits"

    @staticmethod
    @in_place_of("mcore_bridge.model.gpt_model:get_rope_inv_freq")
    def get_rope_inv_freq(original, *arguments, **named):
        found, scaling = original(*arguments, **named)
        return found * 4.0, scaling


class PositionsCountedInHalfPrecision(Fault):
    """Positions are rounded to bfloat16, in which all beyond 256 that are odd have a neighbour's angles."""

    run, rule = "long", "long-sequence"

    @staticmethod
    @in_place_of("megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.get_freqs_non_repeated")
    def rounded(original, self, max_seq_len, offset=0):
        places = torch.arange(max_seq_len, device=self.inv_freq.device) + offset
        return torch.outer(places.bfloat16().to(self.inv_freq.dtype), self.inv_freq)
