"""What a worker is told before it imports or unpickles anything of ours: plain JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from anytron.base.version import __version__
from anytron.device.hooks.types import ProcessInfo

if TYPE_CHECKING:
    from anytron.device.hooks.types import Role

Model = Literal["policy", "reward_model"]
"""Whose ranks processes are: those of the policy, with all that stands beside it in them, or of a reward model."""


@dataclass(frozen=True)
class Bootstrap:
    """The first message to a worker.

    Attributes:
        role: What the process is.
        rank: Rank among the ``world_size`` processes of its group.
        local_rank: Rank among those of the group on this machine.
        world_size: Processes in the group.
        local_world_size: Those of them on this machine.
        replica: Which of the groups of its role that share the work it belongs to.
        init_method: Where the ranks of the group meet, for ``torch.distributed``.
        num_threads: Processor threads to use.
        platform: Name of the platform that the driver chose; the worker does not choose again.
        config: The run's configuration, resolved, as JSON values.
        engine_group: Entry-point group of the engine.
        engine_name: Name of the engine in that group.
        sys_path: The driver's ``sys.path``: what the driver can import, its workers can.
        python: Interpreter of an environment of its own, whose ``sys.path`` the worker keeps; None = the driver's.
        model: Whose rank it is.
        version: The driver's version of Anytron.
    """

    role: Role
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    replica: int
    init_method: str
    num_threads: int
    platform: str
    config: dict[str, Any]
    engine_group: str
    engine_name: str
    sys_path: list[str]
    python: str | None = None
    model: Model = "policy"
    version: str = __version__

    @property
    def name(self) -> str:
        """For people: role, replica if it is not the first, and rank."""
        replica = f" replica {self.replica}" if self.replica else ""
        return f"{self._kind.replace('_', ' ')}{replica} rank {self.rank}"

    @property
    def log(self) -> str:
        """Name of the file that holds what the process writes."""
        replica = f"-{self.replica}" if self.replica else ""
        return f"{self._kind}{replica}-{self.rank}.log"

    @property
    def process(self) -> ProcessInfo:
        """The same as plugins are told."""
        return ProcessInfo(self.role, self.rank, self.local_rank, self.world_size)

    @property
    def _kind(self) -> str:
        return self.role if self.model == "policy" else self.model

    def distributed_env(self) -> dict[str, str]:
        """The variables by which launchers such as torchrun tell a process its place."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
        }
