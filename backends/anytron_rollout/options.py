"""The rollout engine ``transformers`` as it is known before it is imported: its options, and what it can do."""

from __future__ import annotations

from typing import Literal

from anytron.components import EngineInfo
from anytron.config.section import Section


class TransformersOptions(Section):
    """Options of the rollout engine ``transformers``."""

    attn_implementation: str | None = None
    """Which attention of transformers computes: ``sdpa``, ``eager``, ...; default: transformers' choice."""
    device_map: Literal["balanced"] | None = None
    """``balanced`` spreads a model that is too large for one device over all that the process can use; default: the
    process's own device."""


TRANSFORMERS = EngineInfo(
    engine="anytron_rollout.transformers_engine:TransformersEngine",
    options_model=TransformersOptions,
    capabilities=frozenset({"observation"}),
)
