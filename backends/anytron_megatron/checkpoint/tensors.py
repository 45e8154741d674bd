"""The tensors that a checkpoint holds of one model on this rank: weights, adapters and the optimizer's state.

Megatron's own ``sharded_state_dict`` of optimizers is not used: with float32 parameters in a bfloat16 model (routers,
value heads) ``Float16OptimizerWithFloat16Params`` finds no place for their moments, and names differ with and without
``DistributedOptimizer``. Here the names are the same, so that a run with ``DistributedOptimizer`` can load the
checkpoint of a run without it, and the other way round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import Tensor, nn

from anytron_megatron.checkpoint.shards import flat_part, whole
from anytron_megatron.models.source import text_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from megatron.core.optimizer import MegatronOptimizer

    from anytron_megatron.checkpoint.shards import Place, SavedTensor
    from anytron_megatron.lora.adapters import Adapters
    from anytron_megatron.training.trained_model import TrainedModel


MAIN = "main"
"""Name of a parameter's float32 copy in a checkpoint, beside the optimizer's names for its state (``exp_avg``, ...)."""


def trained_tensors(role: str, trained: TrainedModel, adapters: Adapters | None) -> list[SavedTensor]:
    """Collect the tensors that an update changes: weights, buffers and the optimizer's state.

    Args:
        role: ``policy`` or ``critic``; the prefix of each key.
        trained: The model with its optimizer.
        adapters: Adapters that are trained instead of the model's own weights; None = the weights are trained.
    """
    if adapters is None:
        places = list(_places([chunk.module.module for chunk in trained.chunks]))
    else:
        places = list(_adapter_places(adapters))
    weights = [whole(place, place.data, f"{role}.{place.key}") for place in places]
    by_parameter = {id(place.data): (place.key, place) for place in places}
    return [*weights, *_optimizer_tensors(trained.optimizer, by_parameter, role)]


def _places(modules: Sequence[nn.Module]) -> Iterator[Place]:
    """Yield the places of trainable parameters and buffers.

    Frozen parameters are left out: the model directory has them. Extra states are left out too: they are pickles of
    vendors' layers. They hold FP8 scales of delayed scaling, which are measured anew within a few updates.
    """
    for module in modules:
        # Each layer and each expert has a name of its own: layers differ, and experts move between ranks.
        metadata = {"non_homogeneous_layers": True, "singleton_local_shards": True}
        state = cast("Any", module).sharded_state_dict(metadata=metadata)
        for place in state.values():
            if isinstance(place, ShardedObject):
                continue
            if not isinstance(place.data, nn.Parameter) or place.data.requires_grad:
                yield place


def _adapter_places(adapters: Adapters) -> Iterator[Place]:
    """Yield the places of the factors of adapters in the whole model.

    mcore-bridge places some of them wrongly (``LoraParallelLinear.sharded_state_dict``): ``B`` of a gated layer as if
    its two halves were one, and factors of experts as if every rank had the same experts.
    """
    # Not every engine has the libraries that adapters need.
    from anytron_megatron.lora.adapters import factors_of

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
    """Place one factor. Experts are whole on their rank: adapters of split experts are refused."""
    if expert or not getattr(parameter, "tensor_model_parallel", False):
        return ShardedTensor.from_rank_offsets(key, parameter)
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    return ShardedTensor.from_rank_offsets(key, parameter, (parameter.partition_dim, rank, size))  # type: ignore[attr-defined]


def steps_done(optimizer: MegatronOptimizer) -> int:
    """Count the steps that this rank's optimizer has done; 0 if it has no parameters."""
    counts = [0]
    for inner in (part.optimizer for part in _parts(optimizer)):
        counts += [int(group["step"]) for group in inner.param_groups if "step" in group]
        counts += [int(state["step"]) for state in inner.state.values() if "step" in state]
    return max(counts)


def prepare_state(optimizer: MegatronOptimizer, steps: int) -> None:
    """Give the optimizer the state that it has after ``steps`` steps, except for the moments, which the caller fills.

    The number of steps is stored in the parameter group (Apex, Transformer Engine) or beside the moments
    (``torch.optim``).
    """
    for part in _parts(optimizer):
        inner = part.optimizer
        inner.state.clear()
        if steps and part.init_state_fn is not None:
            part.init_state_fn(inner, part.config)
        beside = isinstance(inner, (torch.optim.Adam, torch.optim.AdamW))
        for group in inner.param_groups:
            group.pop("step", None)
            if steps and not beside:
                group["step"] = steps
        if beside:
            for state in inner.state.values():
                state["step"] = torch.tensor(float(steps))


def _optimizer_tensors(
    optimizer: MegatronOptimizer, places: Mapping[int, tuple[str, Place]], role: str
) -> Iterator[SavedTensor]:
    """Yield the optimizer's tensors, each with the place of the parameter that it belongs to.

    Args:
        optimizer: Megatron's optimizer.
        places: Name and place of each parameter, by its ``id``.
        role: Prefix of each key.
    """
    for part in _parts(optimizer):
        for parameter, tensors, start in _held(part):
            parameter_name, place = places[id(parameter)]
            for name, tensor in tensors.items():
                key = f"{role}.optimizer.{name}.{parameter_name}"
                if start is None:
                    yield whole(place, tensor, key)
                else:
                    yield flat_part(place, parameter, tensor, start, key)


def _parts(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers that Megatron chains (dense layers, experts), without those that have no parameters."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]


def _held(part: Any) -> Iterator[tuple[Tensor, dict[str, Tensor], int | None]]:
    """Yield each parameter of which this rank holds state, and the state.

    The last value is where in the flat parameter the state begins; None if it has the parameter's shape.
    """
    if isinstance(part, DistributedOptimizer):
        for ranges in part.gbuf_ranges:
            for buckets in ranges.values():
                for bucket in buckets:
                    for parameter, held in bucket["param_map"].items():
                        group, order = part.model_param_group_index_map[parameter]
                        main = part.optimizer.param_groups[group]["params"][order]
                        yield parameter, _state(part, parameter, main), held["param"].start
        return
    if isinstance(part, FP32Optimizer):
        pairs = [(parameter, parameter) for parameter in part.get_parameters()]
    else:
        pairs = [(parameter, parameter) for group in part.fp32_from_fp32_groups for parameter in group]
        for group, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            pairs += zip(group, mains, strict=True)
    for parameter, main in pairs:
        yield parameter, _state(part, parameter, main), None


def _state(part: Any, parameter: Tensor, main: Tensor) -> dict[str, Tensor]:
    state = part.optimizer.state.get(main, {})
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor) and name != "step"}
    return tensors if main.dtype == parameter.dtype else {MAIN: main, **tensors}
