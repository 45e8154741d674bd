"""Positions, angles and rotations that are not the model's."""

from __future__ import annotations

import copy

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


class AnglesOfTheFirstRowForTheWholeBatch(RotaryFault):
    """Each row of a padded batch gets the first row's angles; rows differ where images have other places or sizes."""

    run, rule = "bshd", "rope"

    def rotate(self, x, freqs, interleaved):
        if freqs.dim() == x.dim() and freqs.shape[1] > 1:
            freqs = freqs[:, :1].expand_as(freqs)
        return rope(x, freqs, interleaved)


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


class PartialRotaryPairsTheWrongDimensions(Fault):
    """Frequencies of zero are left out, so that an entry is turned with one that is nearer than half a head."""

    run, rule = "gemma", "hf-logits"

    @staticmethod
    @in_place_of("mcore_bridge.model.mm_gpts.gemma4:get_rope_inv_freq")
    def shorter(original, *arguments, **named):
        frequencies, scaling = original(*arguments, **named)
        return frequencies[frequencies > 0], scaling


class YarnSoftmaxScaleFromTheWrongMscale(Fault):
    """The scores of latent attention are scaled by ``mscale`` in place of ``mscale_all_dim``."""

    run, rule = "yarn, latent", "hf-logits"

    @staticmethod
    @in_place_of("megatron.core.transformer.multi_latent_attention:MultiLatentAttention.__init__")
    def wrong(original, layer, config, *arguments, **named):
        exchanged = copy.copy(config)
        exchanged.mscale_all_dim = config.mscale
        original(layer, exchanged, *arguments, **named)


class RotaryHalvesInsteadOfPairsInTheIndexer(Fault):
    """Latent attention, in place of an indexer that needs a later Megatron, turns halves where neighbours are pairs."""

    run, rule = "mla", "hf-logits"

    @staticmethod
    @in_place_of("anytron_megatron.patches.rotary:_halves")
    def halves(original, t, size):
        return t


class PackedAnglesRestartUnderContextParallelism(Fault):
    """Each packed sequence gets the angles at the start of a context-parallel rank's table, as the first one does."""

    run, rule = "cp2", "parallel-equals-single"

    @staticmethod
    @in_place_of("mcore_bridge.model.gpt_model:GPTModel.forward")
    def restarting(original, model, *arguments, position_ids, packed_seq_params=None, **named):
        ranks = model.config.context_parallel_size
        if ranks > 1 and packed_seq_params is not None:
            bounds = packed_seq_params.cu_seqlens_q_padded // ranks
            position_ids = torch.cat([position_ids[:, :length] for length in bounds.diff().tolist()], dim=1)
        named |= {"position_ids": position_ids, "packed_seq_params": packed_seq_params}
        return original(model, *arguments, **named)
