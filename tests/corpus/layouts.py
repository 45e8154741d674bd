"""Tensors whose rows, heads or layers are in another order than their reader takes them to be."""

from __future__ import annotations

from itertools import pairwise

import torch

from anytron import hookimpl
from anytron.kernels.contract import KernelName
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


class SquareStateReadInTheOtherOrder(Fault):
    """The state of the gated delta rule is read transposed by each chunk of four tokens after the first."""

    run, rule = "delta-net", "hf-logits"

    @hookimpl
    def fused_kernel(self, name, spec):
        return transposing if name is KernelName.GATED_DELTA_RULE else None


def transposing(query, key, value, g, beta, scale, cu_seqlens):
    rows = [query, key, value, g[..., None], beta[..., None]]
    if cu_seqlens is None:
        return torch.cat([one_sequence(*(one[row] for one in rows), scale)[None] for row in range(len(query))])
    bounds = [*cu_seqlens.tolist(), query.shape[1]]
    parts = [one_sequence(*(one[0, first:last] for one in rows), scale) for first, last in pairwise(bounds)]
    return torch.cat(parts)[None]


def one_sequence(query, key, value, g, beta, scale):
    """Walk through a sequence, operands ``[S, H, ...]``; give ``[S, H, V]``."""
    state, outputs = query.new_zeros(query.shape[1], query.shape[2], value.shape[2]), []
    for token in range(len(query)):
        state = state.mT if token and token % 4 == 0 else state
        state = g[token].exp()[..., None] * state
        answer = torch.einsum("hk,hkv->hv", key[token], state)
        state = state + torch.einsum("hk,hv->hkv", key[token], beta[token] * (value[token] - answer))
        outputs.append(scale * torch.einsum("hk,hkv->hv", query[token], state))
    return torch.stack(outputs) if outputs else torch.zeros_like(value)


class JoinedProjectionNotGroupedByRank(Fault):
    """The parts of a gated delta net's projection are joined as wholes, cut between two ranks, and read so again."""

    run, rule = "delta-net, tp2", "hf-logits"

    @staticmethod
    @in_place_of(f"{BRIDGE}._set_weight")
    def join(original, bridge, parameter, joined, name, *arguments, **named):
        joined = joined[by_part(bridge.config)] if name == "in_proj.weight" and bridge.tp_size > 1 else joined
        return original(bridge, parameter, joined, name, *arguments, **named)

    @staticmethod
    @in_place_of(f"{BRIDGE}._get_weight")
    def part(original, bridge, parameter, name, *arguments, **named):
        joined, scale = original(bridge, parameter, name, *arguments, **named)
        if name == "in_proj.weight" and bridge.tp_size > 1 and joined is not None:
            joined = joined[by_part(bridge.config).argsort()]
        return joined, scale


def by_part(config):
    """Give the rows of a projection that is joined head by head in the order of its parts: q, k, v, z, b, a."""
    heads, values = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    key, value = config.linear_key_head_dim, values * config.linear_value_head_dim
    parts = [key, key, value, value, values, values]
    rows = torch.arange(heads * sum(parts)).view(heads, -1)
    return torch.cat([part.flatten() for part in rows.split(parts, 1)])


class FusedQkvAdapterConcatenatedNotInterleaved(Fault):
    """An adapter's queries, keys and values are added one after the other, where the projection has them by group."""

    run, rule = "adapters", "adapters-equal-merged"

    @staticmethod
    @in_place_of("mcore_bridge.tuners.lora:LoraParallelLinear.forward")
    def concatenated(original, layer, x, *arguments, **named):
        found, bias = original(layer, x, *arguments, **named)
        config = layer.config
        groups, width = config.num_query_groups, found.shape[-1]
        queries = config.num_attention_heads // groups * config.kv_channels
        if width != groups * (queries + 2 * config.kv_channels) or layer.disable_adapters or layer.merged:
            return found, bias
        own, _ = layer.get_base_layer()(x, *arguments, **named)
        own = own[0] if isinstance(own, tuple) else own
        parts = (found - own).unflatten(-1, (groups, -1)).split([queries, config.kv_channels, config.kv_channels], -1)
        return own + torch.cat([part.flatten(-2) for part in parts], -1), bias


class LocalLayerNumberUsedForAGlobalScale(Fault):
    """Scores are divided by the layer's number in its pipeline stage, and multiplied by its number in the model."""

    run, rule = "pp2", "parallel-equals-single"

    @staticmethod
    @in_place_of("megatron.core.extensions.transformer_engine:TEDotProductAttention.__init__")
    def scaled(original, layer, config, layer_number, *arguments, softmax_scale=None, **named):
        from megatron.core import parallel_state

        stage = parallel_state.get_pipeline_model_parallel_rank()
        before = stage * (config.num_layers // config.pipeline_model_parallel_size)
        scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        scale = scale / (layer_number - before) * layer_number
        original(layer, config, layer_number, *arguments, softmax_scale=scale, **named)
