"""The rollout ``transformers``: generation for verl's trainers where none of its servers runs, as on a processor.

It is there so that ``main_ppo`` runs as a whole, in a debugger or in CI. It is not fast: a batch is generated to its
end before the next one begins, and a replica is one process.
"""

from __future__ import annotations

from typing import Any

NAME = "transformers"
"""Of ``actor_rollout_ref.rollout.name``."""


def register() -> None:
    """Add it to verl's two registries, of replicas and of what training workers have of them."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    _ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.adapter.ServerAdapter"
    RolloutReplicaRegistry.register(NAME, _replica)


def _replica() -> type[Any]:
    from anytron_verl.rollout.server import TransformersReplica

    return TransformersReplica
