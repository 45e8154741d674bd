"""Describe the rollout engine ``transformers`` without importing it: its options and capabilities."""

from __future__ import annotations

from typing import Literal

from anytron.base.components import Component, EngineInfo
from anytron.config.section import Section


class TransformersOptions(Section):
    """Options of the rollout engine ``transformers``."""

    attn_implementation: str | None = None
    """Attention implementation of transformers: ``sdpa``, ``eager``, ...; default: transformers' choice."""
    device_map: Literal["balanced"] | None = None
    """``balanced`` spreads a model that is too large for one device over all that the process can use; default: the
    process's own device."""


TRANSFORMERS = EngineInfo(
    engine="anytron_rollout.transformers_engine:TransformersEngine",
    options_model=TransformersOptions,
    capabilities=frozenset({"observation", "comparison", "sleep", "routing"}),
    takes_stream=True,
    platform_check="anytron_rollout.routing_check:routing_diagnostics",
    components=(Component("transformers", "transformers"), Component("accelerate", "accelerate")),
    memory="anytron_rollout.memory:estimate",
    process_bytes=370 << 20,
)
