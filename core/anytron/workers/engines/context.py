"""What an engine, of training or of rollout, is constructed with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anytron.config.schema import RunConfig
    from anytron.device.hooks.types import ProcessInfo
    from anytron.device.stack import DeviceStack


@dataclass(frozen=True)
class EngineContext:
    """What every engine is constructed with, in its worker process, after the bootstrap.

    Attributes:
        config: The run's configuration.
        stack: The device stack of this process: plugins, platform, patches; ``before_import`` has been applied.
        process: Role and rank of this process.
        init_method: Where the ranks of the group meet, for ``torch.distributed.init_process_group``: the executor's
            choice. Ranks on one machine meet in a file that is theirs alone; nothing listens.
    """

    config: RunConfig
    stack: DeviceStack
    process: ProcessInfo
    init_method: str = "env://"
