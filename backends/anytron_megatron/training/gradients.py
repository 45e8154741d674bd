"""A model's gradients under the Hugging Face names of its weights, to compare them with another computation's.

What exports weights exports gradients too: they stand in the weights' places meanwhile, so that shards are gathered and
layers taken apart in the same way. The parameters themselves are not touched.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from megatron.core.distributed import DistributedDataParallel
    from torch import Tensor

SCALE = 2.0**40
"""Gradients are multiplied by it meanwhile: of a 1 that an export adds to a weight, as to some norms, 1e-12 is left."""
UNTRAINED = 2.0**120
"""Stands in the places of what has no gradient; also bfloat16 has this number."""


@torch.no_grad()
def gather_gradients(wrapped: Sequence[DistributedDataParallel]) -> None:
    """Give each data-parallel replica the whole reduced gradients, of which a distributed optimizer has shards.

    A collective over data-parallel replicas.
    """
    for chunk in wrapped:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
            replicas = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                shard = shard_buffer(bucket.grad_data, replicas.size())[replicas.rank()].clone()
                torch.distributed.all_gather_into_tensor(bucket.grad_data, shard, group=replicas)


def named_gradients(
    modules: Sequence[nn.Module], export: Callable[[], Iterator[tuple[str, Tensor]]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradients that stand in ``main_grad``, float32, under the names of an export. A collective, as that is.

    What no gradient belongs to is left out: frozen parameters, and buffers. ``main_grad`` is not fit for an update
    afterwards.

    Args:
        modules: The model on this rank.
        export: Exports what stands in the places of the model's parameters.
    """
    with _in_place_of_weights(modules):
        for name, tensor in export():
            if not bool((tensor == UNTRAINED).any()):
                yield name, tensor.float() / SCALE


@contextlib.contextmanager
def _in_place_of_weights(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let modules have other parameters. Writing into their own would reset what collects their gradients."""
    owners = [owner for module in modules for owner in module.modules()]
    own = [(owner, dict(owner._parameters), dict(owner._buffers)) for owner in owners]
    scaled: dict[nn.Parameter, nn.Parameter] = {}
    try:
        for owner, parameters, buffers in own:
            for name, parameter in parameters.items():
                if parameter is not None:
                    if parameter not in scaled:  # tied parameters have several owners
                        scaled[parameter] = nn.Parameter(_gradient(parameter), requires_grad=False)
                    owner._parameters[name] = scaled[parameter]
            for name, buffer in buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    owner._buffers[name] = torch.full_like(buffer, UNTRAINED)
        yield
    finally:
        for owner, parameters, buffers in own:
            owner._parameters.update(parameters)
            owner._buffers.update(buffers)


def _gradient(parameter: nn.Parameter) -> Tensor:
    if not parameter.requires_grad:
        return torch.full_like(parameter, UNTRAINED)
    gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]  # Megatron's data-parallel wrapper sets it
    return gradient.mul_(SCALE)
