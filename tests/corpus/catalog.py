"""Every fault that is made again, with the entry of ``published`` that it is made after."""

from __future__ import annotations

from tests.corpus import (
    bridges,
    collectives,
    kernels,
    layouts,
    masks,
    objectives,
    optimizers,
    positions,
    precision,
    recomputation,
    rollouts,
    routing,
    samplers,
    schedules,
    stale,
    turns,
)
from tests.corpus.fault import Fault
from tests.corpus.test_published import published

KINDS = (
    bridges,
    collectives,
    kernels,
    layouts,
    masks,
    objectives,
    optimizers,
    positions,
    precision,
    recomputation,
    rollouts,
    routing,
    samplers,
    schedules,
    stale,
    turns,
)


def every_fault() -> list[type[Fault]]:
    """Return the faults that have been made again, by kind."""
    found = [one for kind in KINDS for one in vars(kind).values() if isinstance(one, type) and issubclass(one, Fault)]
    return [one for one in found if one.rule]


def missing() -> set[str]:
    """Return the names of entries that no fault is made after."""
    entries = {entry["name"] for entries in published().values() for entry in entries}
    return entries - {fault.entry() for fault in every_fault()}
