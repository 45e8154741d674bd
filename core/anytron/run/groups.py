"""The groups of processes that a run starts. Importing this module imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.base.components import ROLLOUT_ENGINES, TRAINING_ENGINES
from anytron.run.preflight.capabilities import generates_in_training
from anytron.workers.executor.protocol import GroupSpec

if TYPE_CHECKING:
    from anytron.config.generation import RolloutSection
    from anytron.config.schema import RunConfig


def all_groups(config: RunConfig) -> list[GroupSpec]:
    """Return the specifications of all processes of a run."""
    groups = [training_group(config)]
    if config.reward_model is not None:
        groups.append(reward_model_group(config))
    if not config.supervised and not generates_in_training(config):
        groups += [rollout_group(config.rollout, index) for index in range(config.rollout.replicas)]
    return groups


def training_group(config: RunConfig) -> GroupSpec:
    """Return the specification of a run's training processes."""
    threads = config.executor.num_threads
    return GroupSpec("trainer", TRAINING_ENGINES, config.engine.name, config.parallel.world_size, threads)


def reward_model_group(config: RunConfig) -> GroupSpec:
    """Return the specification of the processes that hold a run's reward model."""
    own = config.of_reward_model
    return GroupSpec(
        "trainer",
        TRAINING_ENGINES,
        config.engine.name,
        own.parallel.world_size,
        config.executor.num_threads,
        model="reward_model",
        config=own,
    )


def rollout_group(settings: RolloutSection, index: int) -> GroupSpec:
    """Return the specification of one replica's process.

    Args:
        settings: Section ``rollout``.
        index: Number of the replica, from 0.
    """
    return GroupSpec(
        "rollout",
        ROLLOUT_ENGINES,
        settings.engine,
        world_size=1,
        num_threads=settings.num_threads,
        replica=index,
        replicas=settings.replicas,
    )
