"""Calls of engines' methods in other processes, as mypy sees them.

A method is named by its protocol, so that a name that the protocol does not have, and an argument that the method does
not take, are errors of mypy; the result has the method's type::

    call(group, TrainingEngine.score, micro_batches, "policy")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import ParamSpec, TypeVarTuple, Unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Concatenate

    from anytron.workers.executor.protocol import Pending, WorkerGroup

Answer = TypeVar("Answer")
Arguments = ParamSpec("Arguments")
Each = TypeVarTuple("Each")


def submit(
    group: WorkerGroup,
    method: Callable[Concatenate[Any, Arguments], Answer],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Pending[Answer]:
    """Call a method on all ranks with the same arguments; see :meth:`WorkerGroup.submit`."""
    return group.submit(method.__name__, *args, **kwargs)


def call(
    group: WorkerGroup,
    method: Callable[Concatenate[Any, Arguments], Answer],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> list[Answer]:
    """Call a method on all ranks with the same arguments, and wait; see :meth:`WorkerGroup.call`."""
    return group.call(method.__name__, *args, **kwargs)


def submit_each(
    group: WorkerGroup, method: Callable[[Any, Unpack[Each]], Answer], arguments: Sequence[tuple[Unpack[Each]]]
) -> Pending[Answer]:
    """Call a method on all ranks, each with its own arguments; see :meth:`WorkerGroup.submit_each`."""
    return group.submit_each(method.__name__, arguments)


def scatter(
    group: WorkerGroup, method: Callable[[Any, Unpack[Each]], Answer], arguments: Sequence[tuple[Unpack[Each]]]
) -> list[Answer]:
    """Call a method on all ranks, each with its own arguments, and wait; see :meth:`WorkerGroup.scatter`."""
    return group.scatter(method.__name__, arguments)
