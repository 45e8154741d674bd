"""Check that the routing of a run's model can be told. Imports neither torch nor transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from anytron.base.errors import ConfigError
from anytron.config.diagnostics import Diagnostic
from anytron.task.data.model_files import read_config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.config.schema import RunConfig
    from anytron.device.platform import Platform

TOLD = ("deepseek_v3", "qwen3_moe")
"""Types of models of which :mod:`anytron_rollout.routing` can tell the routing: a test compares it with Megatron's."""


def routing_diagnostics(config: RunConfig, platform: Platform) -> Iterator[Diagnostic]:
    """Refuse ``rollout.replay_routing`` for other models; the platform does not matter."""
    del platform
    if not config.rollout.replay_routing:
        return
    model = config.model
    try:
        fields = (model.config or {}) if model.path is None else read_config(Path(model.path))
    except ConfigError:
        return  # reported by itself
    if fields.get("model_type") not in TOLD:
        message = f"the engine transformers cannot record the routing of {fields.get('model_type')}"
        yield Diagnostic("error", "rollout.replay_routing", message, f"leave it out; supported are {', '.join(TOLD)}")
