"""Random states of a rank, under keys that name no device, in one safetensors file per rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from anytron.device.runtime import DeviceRuntime

HOST, DEVICE, TRACKED = "host", "device", "tracked."
"""Keys: torch's generator of the processor, the device's, and the states of Megatron's tracker by name. Nothing of the
engine draws from Python's or NumPy's generators."""


def random_file(rank: int) -> str:
    """Name a rank's file."""
    return f"random-{rank:05}.safetensors"


def random_states(runtime: DeviceRuntime) -> dict[str, Tensor]:
    """Copy every random state of this rank, uint8 on the host."""
    tracked = {f"{TRACKED}{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    states = {HOST: torch.get_rng_state(), DEVICE: runtime.get_rng_state(), **tracked}
    return {name: state.detach().cpu().clone() for name, state in states.items()}


def restore_random_states(states: Mapping[str, Tensor], runtime: DeviceRuntime) -> None:
    """Set every random state of this rank."""
    torch.set_rng_state(states[HOST])
    runtime.set_rng_state(states[DEVICE])
    get_cuda_rng_tracker().set_states(
        {name.removeprefix(TRACKED): state for name, state in states.items() if name.startswith(TRACKED)}
    )
