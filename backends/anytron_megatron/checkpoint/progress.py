"""How far an engine has come: counters and layout in JSON, and each rank's random states, beside the tensors."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from anytron.config.json_files import read_object
from anytron_megatron.checkpoint.unpickling import refusal

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from anytron.device.runtime import DeviceRuntime


PROGRESS = "progress.json"


VERSION = 1


@dataclass(frozen=True)
class ModelProgress:
    """How far one model has come.

    Attributes:
        updates: Updates done.
        schedule_steps: Where the learning-rate schedule stands; its shape is the configuration's.
        optimizer_steps: Steps that the optimizer counts, for bias correction.
    """

    updates: int
    schedule_steps: int
    optimizer_steps: int


@dataclass(frozen=True)
class Progress:
    """What a checkpoint says beside its tensors.

    Attributes:
        layout: The parallel sizes, and the type of device: random states belong to both.
        models: By role.
    """

    layout: Mapping[str, Any]
    models: Mapping[str, ModelProgress]

    def to_json(self) -> bytes:
        """Write it down."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1).encode()

    @classmethod
    def read(cls, directory: Path) -> Progress:
        """Read it.

        Raises:
            EngineError: There is none, or it is not what this version writes.
        """
        file = directory / PROGRESS
        try:
            content = read_object(file)
            if content["version"] != VERSION:
                raise refusal(file, f"it has version {content['version']}, this Anytron reads {VERSION}")
            models = {role: ModelProgress(**model) for role, model in content["models"].items()}
            if not all(type(count) is int for model in models.values() for count in asdict(model).values()):
                raise refusal(file, "its counters are not numbers")
            return cls(dict(content["layout"]), models)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise refusal(file, f"{type(error).__name__}: {error}") from error


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
