"""The factors of adapters, each with its place in the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

from anytron_megatron.lora.adapters import factors_of
from anytron_megatron.models.source import text_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from anytron_megatron.checkpoint.shards import Place
    from anytron_megatron.lora.adapters import Adapters


def adapter_places(adapters: Adapters) -> Iterator[Place]:
    """Yield the places of the factors of adapters.

    mcore-bridge places some of them wrongly (``LoraParallelLinear.sharded_state_dict``): ``B`` of a gated layer as if
    its two halves were one, and factors of experts as if every rank had the same experts.
    """
    gated = {
        id(layer)
        for chunk in adapters.chunks
        if text_model(chunk).config.gated_linear_unit
        for name, layer in chunk.named_modules()
        if name.rpartition(".")[2] == "linear_fc1"
    }
    for name, layer in adapters.layers.items():
        experts = layer.base_layer.num_gemms if layer.is_grouped else 0
        first = parallel_state.get_expert_model_parallel_rank() * experts
        for index, (_, a, b) in enumerate(factors_of(layer), start=first):
            key = f"adapters.{name}.{index}" if experts else f"adapters.{name}"
            for factor, parameter in ((f"{key}.A", a), (f"{key}.B", b)):
                placed = _factor(factor, parameter, expert=bool(experts))
                halves = id(layer) in gated and parameter is b and not experts
                yield apply_swiglu_sharded_factory(placed, (), True) if halves else placed


def _factor(key: str, parameter: Tensor, *, expert: bool) -> ShardedTensor:
    """Place one factor. Experts are whole on their rank: adapters of split ones are refused."""
    if expert or not getattr(parameter, "tensor_model_parallel", False):
        return ShardedTensor.from_rank_offsets(key, parameter)
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    return ShardedTensor.from_rank_offsets(key, parameter, (parameter.partition_dim, rank, size))  # type: ignore[attr-defined]
