"""Level ``device``: the runtime, its random numbers, memory and collectives, the environment, options and patches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron_conformance.device.collectives import collective_results
from anytron_conformance.device.environment import (
    environment_agrees,
    environment_is_plain,
    environment_reaches_ranks,
    options_are_typed,
    patches_take_effect,
)
from anytron_conformance.device.memory import (
    memory_figures,
    out_of_memory,
    peak_memory,
    pinned_memory,
    streams_order_work,
    synchronize_waits,
)
from anytron_conformance.device.operators import own_operators
from anytron_conformance.device.placement import (
    dtypes_compute,
    own_device,
    probe_and_runtime,
    ranks_own_devices,
    says_what_it_is,
    tensors_stay,
)
from anytron_conformance.device.random_numbers import own_generator, rng_round_trip, seeds_decide

if TYPE_CHECKING:
    from anytron_conformance.rules import Rule

RULES: tuple[Rule, ...] = (
    probe_and_runtime,
    says_what_it_is,
    options_are_typed,
    environment_is_plain,
    environment_agrees,
    own_device,
    tensors_stay,
    own_operators,
    dtypes_compute,
    rng_round_trip,
    seeds_decide,
    own_generator,
    memory_figures,
    peak_memory,
    out_of_memory,
    streams_order_work,
    synchronize_waits,
    pinned_memory,
    patches_take_effect,
    environment_reaches_ranks,
    ranks_own_devices,
    collective_results,
)
