"""The argument with which training and rollout engines are constructed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anytron.config.schema import RunConfig
    from anytron.device.hooks.types import ProcessInfo
    from anytron.device.stack import DeviceStack


@dataclass(frozen=True)
class EngineContext:
    """The argument of every engine's constructor, which is called in the worker process after the bootstrap.

    Attributes:
        config: The run's configuration.
        stack: The plugins, platform and patches of this process; the hook ``before_import`` has been called.
        process: Role and rank of this process.
        init_method: Rendezvous of the group's ranks, for ``torch.distributed.init_process_group``; the executor chooses
            it. Ranks on one machine use a private file, so that no port is open.
    """

    config: RunConfig
    stack: DeviceStack
    process: ProcessInfo
    init_method: str = "env://"
