"""Fixes of process groups, of collectives, of sends between pipeline stages, and of recomputation."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from anytron.sequences.scopes import rescoped

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from torch import Tensor


def share_groups_of_one_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``create_group``: for the same single rank and timeout, return the group made first.

    Megatron splits the ranks about twenty times, by tensor, pipeline, context, data and expert parallelism and
    their products. Where a size is 1, each part is a single rank and still gets a process group for each split: over
    gloo that is three threads in every process, one of which wakes up a hundred times a second. A group of one rank
    never communicates, so one group can serve for all.

    Making a group is a collective of all ranks, members or not, which numbers the group. All ranks request the same
    groups in the same order. Whether a group is shared depends on the request alone, never on a rank's membership,
    so that either all ranks make a new one or none does.

    Two kinds are not shared: groups with options (a communicator's size), because they differ, and groups with a
    backend, because ``destroy_model_parallel`` destroys them one by one and only on their members. All others live
    as long as the default group, and so do shared ones.
    """
    shared: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, timedelta | None], Any]] = WeakKeyDictionary()

    @functools.wraps(original)
    def create(
        ranks: list[int] | None = None,
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
    ) -> Any:
        make = functools.partial(original, ranks, timeout, backend, pg_options, use_local_synchronization)
        if ranks is None or len(ranks) != 1 or backend or pg_options is not None or use_local_synchronization:
            return make(group_desc)
        world = dist.group.WORLD
        assert world is not None, "Megatron makes groups after torch.distributed is initialised"
        groups = shared.setdefault(world, {})
        key = (ranks[0], timeout)
        if key not in groups:
            groups[key] = make("ONE_RANK")
        return groups[key]

    return create


def skip_for_one_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a collective ``(output, input, ..., group, async_op)``: skip it in a group of one rank.

    The distributed optimizer reduces each gradient buffer to this rank's shard of it, and gathers parameters from
    shards. If one rank has everything, shard and buffer are the same memory, and nothing has to be done. gloo
    nevertheless starts the operation. Its threads copy buffers with OpenMP, each with its own team of threads, and from
    then on GNU OpenMP counts more threads than there are processors, so that all teams of the process sleep between any
    two operations instead of spinning: two cores computed no faster than one.

    An operation that overlaps with computation is still called, because Megatron waits for its result.
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


def send_aliases(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_p2p_ops``: send aliases, which keep a tensor's memory until a pipeline stage has sent it.

    An interleaved schedule starts to send a tensor and frees its memory at once
    (``deallocate_output_tensor``: ``out.data = torch.empty(1)``). A process group that copies tensors on a stream of
    the device holds the memory by then. One that sends from the tensor's own memory (gloo) sends whatever is there
    when the receiver asks for it. An alias of the tensor keeps the memory for as long as the request holds the alias.
    """

    @functools.wraps(original)
    def post(*, tensor_send_prev: Tensor | None, tensor_send_next: Tensor | None, **rest: Any) -> Any:
        return original(
            tensor_send_prev=None if tensor_send_prev is None else tensor_send_prev.detach(),
            tensor_send_next=None if tensor_send_next is None else tensor_send_next.detach(),
            **rest,
        )

    return post


def rescope_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``checkpoint(function, ...)`` and ``te_checkpoint(forward_func, ...)``: recompute in the batch's scope.

    In a pipeline schedule the backward pass of micro-batch i may run while micro-batch j is the current one,
    and on a thread of autograd's. Megatron has three ways to recompute. Each takes the function to run again, and
    this wrapper and :func:`rescope_method` tie that function to its scope (:mod:`anytron.sequences.scopes`).
    """

    @functools.wraps(original)
    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(rescoped(function), *args, **kwargs)

    return checkpoint


def rescope_method(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``CheckpointWithoutOutput.checkpoint(self, run_function, ...)`` as :func:`rescope_function` does."""

    @functools.wraps(original)
    def checkpoint(self: Any, run_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(self, rescoped(run_function), *args, **kwargs)

    return checkpoint
