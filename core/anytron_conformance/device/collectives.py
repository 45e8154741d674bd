"""Collectives of the platform's communication backend against plain arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import distributed

from anytron.device.platform import Feature
from anytron.proof.checks import Inapplicable
from anytron_conformance.ranks import Member, on_ranks
from anytron_conformance.rules import Broken, Case, rule

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from anytron_conformance.subject import Subject

RANKS = 2
LENGTH = 6
"""Length of each rank's operand; divisible by the number of ranks."""


def _of(rank: int, length: int = LENGTH) -> Tensor:
    """The numbers of a rank, float64; exact in bfloat16, and different on each rank and at each place."""
    return torch.arange(1, length + 1, dtype=torch.float64) * (1 + 2 * rank) - 4 * rank


def _all_reduce(operation: distributed.ReduceOp.RedOpType, own: Tensor, member: Member) -> Tensor:
    del member
    distributed.all_reduce(own, operation)
    return own


def _all_gather(own: Tensor, member: Member) -> Tensor:
    found = own.new_empty(member.size * own.numel())
    distributed.all_gather_into_tensor(found, own)
    return found


def _reduce_scatter(own: Tensor, member: Member) -> Tensor:
    found = own.new_empty(own.numel() // member.size)
    distributed.reduce_scatter_tensor(found, own)
    return found


def _broadcast(own: Tensor, member: Member) -> Tensor:
    distributed.broadcast(own, member.size - 1)
    return own


def _all_to_all(own: Tensor, member: Member) -> Tensor:
    """Every rank sends its first third to rank 0 and the rest to rank 1."""
    third = own.numel() // 3
    parts = [third, own.numel() - third]
    found = own.new_empty(member.size * parts[member.rank])
    distributed.all_to_all_single(found, own, [parts[member.rank]] * member.size, parts)
    return found


def _point_to_point(own: Tensor, member: Member) -> Tensor:
    found, other = torch.empty_like(own), 1 - member.rank
    wait = [
        distributed.P2POp(distributed.isend, own, other),
        distributed.P2POp(distributed.irecv, found, other),
    ]
    for work in distributed.batch_isend_irecv(wait):
        work.wait()
    return found


def _async_sum(own: Tensor, member: Member) -> Tensor:
    del member
    work = distributed.all_reduce(own, async_op=True)
    work.wait()
    return own


def _sum(rank: int) -> Tensor:
    del rank
    return _of(0) + _of(1)


def _scattered(rank: int) -> Tensor:
    return (_of(0) + _of(1)).chunk(RANKS)[rank]


def _exchanged(rank: int) -> Tensor:
    third = LENGTH // 3
    return torch.cat([_of(one)[:third] if rank == 0 else _of(one)[third:] for one in range(RANKS)])


COLLECTIVES: dict[str, tuple[Callable[[Tensor, Member], Tensor], Callable[[int], Tensor]]] = {
    "sum": (lambda own, member: _all_reduce(distributed.ReduceOp.SUM, own, member), _sum),
    "sum, asynchronous": (_async_sum, _sum),
    "max": (
        lambda own, member: _all_reduce(distributed.ReduceOp.MAX, own, member),
        lambda _rank: _of(0).maximum(_of(1)),
    ),
    "average": (lambda own, member: _all_reduce(distributed.ReduceOp.AVG, own, member), lambda rank: _sum(rank) / 2),
    "broadcast from the last": (_broadcast, lambda _rank: _of(RANKS - 1)),
    "all-gather": (_all_gather, lambda _rank: torch.cat([_of(0), _of(1)])),
    "reduce-scatter": (_reduce_scatter, _scattered),
    "all-to-all, unequal parts": (_all_to_all, _exchanged),
    "point to point": (_point_to_point, lambda rank: _of(1 - rank)),
}
CASES = [
    Case(
        f"{name} in {dtype}",
        (name, dtype),
        place + len(COLLECTIVES) * (dtype == "bfloat16"),
        needs=(Feature.BFLOAT16,) if dtype == "bfloat16" else (),
    )
    for place, name in enumerate(COLLECTIVES)
    for dtype in ("float32", "bfloat16")
]


@rule(
    "collective-results",
    "device",
    "Collectives over two ranks give what arithmetic gives, in rank order, in float32 and bfloat16.",
    cases=CASES,
    limit_s=360.0,
)
def collective_results(subject: Subject, case: Case) -> None:
    """Two processes on two devices call each collective with numbers that are different for each rank and position.

    A sum must not be divided, and an average must be divided once; gathered parts are in rank order, and every rank
    gets its own part of a scatter. If the backend has no average, the case is counted as skipped: engines then divide a
    sum.
    """
    on_ranks(subject, RANKS, compare_collective, *case.values)


def compare_collective(member: Member, name: str, dtype_name: str) -> None:
    """Call one collective and compare its result exactly: the numbers add up to the same sum in any order."""
    call, define = COLLECTIVES[name]
    dtype = getattr(torch, dtype_name)
    own = _of(member.rank).to(member.subject.device, dtype)
    try:
        found = call(own, member)
    except (RuntimeError, ValueError) as error:
        if name == "average" and "AVG" in str(error):
            backend = member.subject.runtime.communication_backend
            raise Inapplicable(f"the backend {backend} has no average") from error
        raise
    expected = define(member.rank).to(dtype)
    if found.device.type != member.subject.runtime.device_type:
        device_type = member.subject.runtime.device_type
        raise Broken("The result is on another device.", f"it is on {found.device}, expected {device_type}")
    if found.dtype != dtype or not torch.equal(found.cpu(), expected):
        raise Broken(
            f"The result of '{name}' is wrong.", f"{found.tolist()} in {found.dtype}, expected {expected.tolist()}"
        )
