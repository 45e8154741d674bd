"""Collect what context-parallel ranks computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup


def gather_slots(group: ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Make the ``gather`` that :meth:`SequenceLayout.unpack` asks for.

    The returned function takes this rank's slots ``[N, ...]`` and gives all ranks' ``[size * N, ...]``
    in rank order. The gradient flows through the local slice only: each rank's loss sees all
    tokens, and the gradients of the parameters are summed over context-parallel ranks afterwards, so
    that a gradient through the others' slices would count every token ``size`` times.

    Args:
        group: The context-parallel process group.
    """

    def gather(slots: Tensor) -> Tensor:
        local = slots.detach().contiguous()
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, local, group=group)
        parts[dist.get_rank(group)] = slots
        return torch.cat(parts)

    return gather
