"""Tensor-parallel and context-parallel communication with gradients (Shoeybi et al., arXiv:1909.08053).

``replicate`` and ``reduce`` are a pair, and so are ``gather_first`` and ``reduce_scatter_first``: what one does in the
forward pass, its partner does in the backward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from anytron.base.errors import EngineError
from anytron_megatron.portable_te.binding import kernels

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def _apply(function: type[torch.autograd.Function], x: Tensor, group: ProcessGroup | None) -> Tensor:
    # None would mean "all processes" to torch.distributed.
    if group is None:
        raise EngineError(
            "A tensor-parallel layer has no process group.",
            where="transformer_engine.pytorch",
            why="it was built before torch.distributed was initialised",
            fix="initialise model parallelism before you build the model, or call set_tensor_parallel_group",
        )
    result: Tensor = function.apply(x, group)
    return result


def _all_reduced(x: Tensor, group: ProcessGroup) -> Tensor:
    # A copy, because the reduction works in place and autograd may still need the input.
    reduced = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(reduced, group=group)
    return reduced


def _order_matters(group: ProcessGroup) -> bool:
    """Whether a reduction must add in one order: the sum of two numbers has none."""
    return dist.get_world_size(group) > 2 and kernels().invariant


def _summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """Add the ranks' parts; if kernels are company-invariant, in the order of ranks.

    A reduction of more than two ranks adds an element in an order that depends on its place in the message.
    """
    if not _order_matters(group):
        return _all_reduced(x, group)
    total, *others = _gathered(x, group).chunk(dist.get_world_size(group))
    for part in others:
        total = total + part
    return total


def _gathered(x: Tensor, group: ProcessGroup) -> Tensor:
    whole = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


def _reduce_scattered(x: Tensor, group: ProcessGroup) -> Tensor:
    part = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    dist.reduce_scatter_tensor(part, x.contiguous(), group=group)
    return part


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduced(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:  # noqa: ARG004 - autograd's signature
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce_scattered(grad, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        if _order_matters(group):
            return _summed(x, group).chunk(dist.get_world_size(group))[dist.get_rank(group)]
        return _reduce_scattered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gathered(grad, ctx.group), None


def replicate(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return ``x``, equal on all ranks, for a computation that is split between the ranks; add the ranks' gradients."""
    return _apply(_Replicate, x, group)


def reduce(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Add the ranks' parts; every rank has the sum."""
    return _apply(_Reduce, x, group)


def gather_first(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Concatenate the ranks' parts along the first dimension; the backward pass adds and splits the gradients."""
    return _apply(_Gather, x, group)


def reduce_scatter_first(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Add the ranks' parts and keep this rank's share of the first dimension."""
    return _apply(_ReduceScatter, x, group)
