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
