"""Tensors whose rows, heads or layers are in another order than their reader takes them to be."""

from __future__ import annotations

import torch

from tests.corpus.fault import Fault, in_place_of

BRIDGE = "mcore_bridge.bridge.gpt_bridge:GPTBridge"


class PackedBatchSplitOverRanksAsOneRow(Fault):
    """Context-parallel ranks get pieces of the whole pack, which cross its sequences."""

    run, rule = "cp2", "hf-logits"

    @staticmethod
    @in_place_of("anytron.sequences.planning:zigzag_order")
    def as_one(original, padded, size, slots):
        return original(padded.sum()[None], size, slots)


class LocalLayerNumberUsedForAGlobalScale(Fault):
    """A pipeline stage counts its layers from one, and chooses the kind of each by that number."""

    run, rule = "window-pp2", "hf-logits"

    @staticmethod
    @in_place_of(
        "megatron.core.transformer.utils:is_layer_window_attention",
        "megatron.core.transformer.dot_product_attention:is_layer_window_attention",
    )
    def local(original, window_size, frequency, layer_number):
        return original(window_size, frequency, 1)


class JoinedProjectionNotGroupedByRank(Fault):
    """The parts of a joined projection are joined as a whole, and then cut by rank."""

    run, rule = "tp2", "hf-logits"

    @staticmethod
    @in_place_of(f"{BRIDGE}._split_tp")
    def whole(original, self, hf_weight, tp_dim, *arguments, **named):
        if tp_dim == 0 and hf_weight.dim() == 3 and len(hf_weight) == 2:  # gate and up
            hf_weight = hf_weight.flatten(0, 1).unflatten(0, (-1, 2)).transpose(0, 1)
        return original(self, hf_weight, tp_dim, *arguments, **named)


class GateAndUpReorderedWhenACheckpointIsLoaded(Fault):
    """The middle two quarters of a joined gate and up projection are exchanged."""

    run, rule = "qwen3", "export-equals-import"

    @staticmethod
    @in_place_of("anytron_megatron.models.bridge:load_weights")
    def reorder(original, bridge, chunks, *arguments):
        original(bridge, chunks, *arguments)
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if name.endswith("mlp.linear_fc1.weight"):
                    first, second, third, fourth = parameter.data.chunk(4)
                    parameter.data.copy_(torch.cat([first, third, second, fourth]))
