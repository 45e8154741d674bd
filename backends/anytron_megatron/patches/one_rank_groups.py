"""Share one process group among all of Megatron's groups of the same single rank.

Megatron splits the ranks about twenty times, by tensor, pipeline, context, data and expert parallelism and
their products. Where a size is 1, each part is a single rank and still gets a process group for each split: over
gloo that is three threads in every process, one of which wakes up a hundred times a second. A group of one rank
never communicates, so one group can serve for all.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta


def share_groups_of_one_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``create_group``: for the same single rank and timeout, return the group made first.

    To make a group is a collective of all ranks, members or not, and gives it a number. All ranks ask for the same
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
