"""Arguments and answers of the hooks: frozen dataclasses, so that new fields do not break plugins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from anytron.device.platform import Platform
    from anytron.kernels.contract import KernelSource

Role = Literal["driver", "trainer", "rollout"]
"""Kinds of process: ``driver`` runs the RL loop, ``trainer`` is a training rank or a rank of a reward model,
``rollout`` generates."""


OWN_TRAINER = "own_trainer"
"""Name of the engine in a process whose training loop and models are not Anytron's (:mod:`anytron.device.stack`)."""


@dataclass(frozen=True)
class Requirement:
    """A package that a plugin needs.

    Attributes:
        package: Distribution name, as in ``importlib.metadata``.
        specifier: PEP 440 version range, for example ``>=0.16,<0.17``; empty = any.
        remedy: What to run or set when it is missing or outside of the range.
        optional: True: a missing package is reported and does not stop the run.
    """

    package: str
    specifier: str = ""
    remedy: str = ""
    optional: bool = False


@dataclass(frozen=True)
class ConfigEdit:
    """A change of the run's configuration.

    Attributes:
        key: The dotted key that is set, for example ``engine.sequence_format``.
        value: New value of the key.
        reason: Reason for the edit, shown to the user in the first lines of the run. No full stop.
        default: True: the value is a recommendation, which is ignored if the user has set the key.
    """

    key: str
    value: Any
    reason: str
    default: bool = False


@dataclass(frozen=True)
class ProcessInfo:
    """The process about to start.

    Attributes:
        role: Kind of process.
        rank: Number of the process among all processes of that role.
        local_rank: Number of the process among those of that role on its machine.
        world_size: Number of processes of that role.
    """

    role: Role
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1


@dataclass(frozen=True)
class PatchContext:
    """The process for which a plugin decides on its patches.

    Attributes:
        platform: The active platform.
        role: Kind of the process in which the patches will be applied.
        kernels: The facade over all plugins, for functions that install kernels.
        engine: Name of the engine of that process, as in ``engine.name`` and ``rollout.engine``, or
            :data:`OWN_TRAINER`.
    """

    platform: Platform
    role: Role
    kernels: KernelSource
    engine: str
