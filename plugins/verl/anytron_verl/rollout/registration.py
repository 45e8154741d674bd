"""The rollout among verl's, without an import of its code."""

from __future__ import annotations

from typing import Any

from anytron_verl.names import ROLLOUT


def register() -> None:
    """Add it to verl's two registries, of replicas and of what training workers have of them."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    _ROLLOUT_REGISTRY[ROLLOUT, "async"] = "anytron_verl.rollout.adapter.ServerAdapter"
    RolloutReplicaRegistry.register(ROLLOUT, _replica)


def _replica() -> type[Any]:
    from anytron_verl.rollout.server import TransformersReplica

    return TransformersReplica
