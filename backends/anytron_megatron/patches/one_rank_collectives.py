"""Reduce gradients and gather parameters over a group of one rank without a collective.

The distributed optimizer reduces each gradient buffer to this rank's shard of it, and gathers parameters from shards.
Where one rank has everything, shard and buffer are the same memory, and both are done before they begin.

gloo begins all the same. Its threads copy buffers with OpenMP, each with a team of its own, and from then on GNU OpenMP
counts more threads than there are processors, so that all teams of the process sleep between any two operations
instead of spinning: two cores computed no faster than one.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def skip_for_one_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function ``(output, input, ..., group, async_op)`` whose output is its input if the group is one rank.

    One that is to overlap with computation is called: Megatron waits for what it returns.
    """

    @functools.wraps(original)
    def collective(
        output: Tensor, tensor: Tensor, *, group: dist.ProcessGroup, async_op: bool = False, **rest: Any
    ) -> Any:
        if async_op or dist.get_world_size(group) > 1:
            return original(output, tensor, group=group, async_op=async_op, **rest)
        if output.data_ptr() != tensor.data_ptr():
            output.copy_(tensor)
        return None

    return collective
