"""The rule about operators: the device computes each of them by its own kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.device.platform import Feature
from anytron.proof.doctor.operators import operators
from anytron.proof.doctor.probes import Bench
from anytron_conformance.ranks import Member, on_ranks
from anytron_conformance.rules import Broken, Case, rule

if TYPE_CHECKING:
    from anytron_conformance.subject import Subject


@rule(
    "own-operators",
    "device",
    "The device has a kernel for each operator of a training step.",
    needs=[Feature.OWN_DEVICE],
)
def own_operators(subject: Subject, case: Case) -> None:
    """A small transformer layer in plain torch is trained for one step, and the dispatcher is asked for each kernel.

    An operator without a kernel goes to the device's fallback. That is usually the host: the results are right, and
    each call copies its operands to the host and back.
    """
    del case
    on_ranks(subject, 1, count_operators)


def count_operators(member: Member) -> None:
    """Train the layer on this rank's device."""
    found = operators(Bench(member.subject.session, None))
    if found["host"]:
        raise Broken("The device lacks kernels for operators of a training step.", found["named"])
