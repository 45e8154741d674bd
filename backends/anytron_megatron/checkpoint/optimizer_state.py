"""The optimizer's state with its places in the whole model, and the number of its steps.

Megatron's own ``sharded_state_dict`` of optimizers is not used: with float32 parameters in a bfloat16 model (routers,
value heads) ``Float16OptimizerWithFloat16Params`` finds no place for their moments, and names differ with and without
``DistributedOptimizer``. Here they do not: either reads what the other has saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from torch import Tensor

from anytron_megatron.checkpoint.shards import flat_part, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from megatron.core.optimizer import MegatronOptimizer

    from anytron_megatron.checkpoint.shards import Place, SavedTensor

MAIN = "main"
"""The float32 copy of a parameter of another type, beside what the optimizer calls its state (``exp_avg``, ...)."""


def steps_done(optimizer: MegatronOptimizer) -> int:
    """Count the steps that this rank's optimizer has done; 0 if it has no parameters."""
    counts = [0]
    for inner in _inner(optimizer):
        counts += [int(group["step"]) for group in inner.param_groups if "step" in group]
        counts += [int(state["step"]) for state in inner.state.values() if "step" in state]
    return max(counts)


def prepare_state(optimizer: MegatronOptimizer, steps: int) -> None:
    """Give the optimizer the state of one that has done so many steps; moments are still to be filled.

    The number stands in the parameter group (Apex, Transformer Engine) or beside the moments (``torch.optim``).
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


def optimizer_tensors(
    optimizer: MegatronOptimizer, places: Mapping[int, tuple[str, Place]], role: str
) -> Iterator[SavedTensor]:
    """Yield the optimizer's tensors, each with the place of the parameter that it belongs to.

    Args:
        optimizer: Megatron's.
        places: Name and place of each parameter, by its ``id``.
        role: Begins each key.
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


def _inner(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    return [part.optimizer for part in _parts(optimizer)]


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
