"""The rollout among verl's, without an import of its code."""

from __future__ import annotations

from typing import Any

from anytron_verl import process
from anytron_verl.names import ROLLOUT


def register() -> None:
    """Add it to verl's two registries, of replicas and of what training workers have of them; once."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    if (ROLLOUT, "async") not in _ROLLOUT_REGISTRY:
        _ROLLOUT_REGISTRY[ROLLOUT, "async"] = "anytron_verl.rollout.adapter.ServerAdapter"
        process.at_stop(_ROLLOUT_REGISTRY.pop, (ROLLOUT, "async"), None)
        RolloutReplicaRegistry.register(ROLLOUT, _replica)
        process.at_stop(RolloutReplicaRegistry._registry.pop, ROLLOUT, None)


def _replica() -> type[Any]:
    from anytron_verl.rollout.server import TransformersReplica

    return TransformersReplica
