"""Let a training engine compute on the trajectories what the checks compare."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from anytron.algorithms.policy_loss import PolicyLoss
from anytron.errors import EngineError
from anytron.trainer.updates import UpdatePlan
from anytron.verification.trajectories import SAMPLES

if TYPE_CHECKING:
    from torch import Tensor

    from anytron.batch import RaggedBatch, TokenOutputs
    from anytron.config.schema import RunConfig
    from anytron.trainer.workers import TrainingWorkers

WHOLE_LOGITS = 4
"""Number of sequences whose whole logits, and whose gradients, are compared: they fill the memory."""
OTHER_TEMPERATURE = 0.7
"""Log-probs and entropies are compared at it too: at 1 nobody sees if the temperature is left out."""


@dataclass(frozen=True)
class Forward:
    """What the forward passes of an engine give, before any update.

    Attributes:
        logits: float32 ``[T', V]`` of the first sequences.
        by_temperature: Log-probs and entropies, float32 ``[T]``, of all at each of :func:`temperatures`.
    """

    logits: Tensor
    by_temperature: dict[float, TokenOutputs]


@dataclass(frozen=True)
class Observation:
    """Values of an engine that are compared with those of another layout.

    Attributes:
        log_probs: float32 ``[T]`` of all sequences, before any update.
        grad_norm: L2 norm of the gradient of one update on all of them, before clipping.
    """

    log_probs: Tensor
    grad_norm: float


def temperatures(config: RunConfig) -> tuple[float, ...]:
    """The run's temperature, and another one."""
    return tuple(dict.fromkeys((config.rollout.temperature, OTHER_TEMPERATURE)))


def gradient_temperature(config: RunConfig) -> float:
    """The run's temperature, unless it is 1: then nobody sees if a gradient is not divided by it."""
    own = config.rollout.temperature
    return OTHER_TEMPERATURE if own == 1.0 else own


def plan_of(trainer: TrainingWorkers, config: RunConfig, group_size: int = SAMPLES) -> UpdatePlan:
    """Plan one update on all of a batch, in the run's micro-batches."""
    plan = UpdatePlan.from_config(config, trainer.topology[0])
    return replace(plan, epochs=1, count=1, group_size=group_size)


def observe_forward(trainer: TrainingWorkers, config: RunConfig, batch: RaggedBatch) -> Forward:
    """Compute everything that needs no gradient."""
    plan = plan_of(trainer, config)
    return Forward(
        trainer.logits(first_sequences(batch)),
        {
            temperature: trainer.token_outputs(replace(batch, temperature=temperature), plan, "policy")
            for temperature in temperatures(config)
        },
    )


def observe(trainer: TrainingWorkers, config: RunConfig, batch: RaggedBatch) -> Observation:
    """Compute log-probs and do one update; the weights are others afterwards."""
    plan = plan_of(trainer, config)
    scored = trainer.token_outputs(batch, plan, "policy")
    assert scored.log_probs is not None, "every engine computes log-probs"
    loss = PolicyLoss(config.algorithm)
    batch = batch.scored(scored)
    if config.algorithm.kl_coefficient > 0.0:
        batch = replace(batch, reference_log_probs=trainer.score(batch, plan, "reference"))
    mini_batch = next(plan.mini_batches(batch, config.trainer.seed))
    metrics = trainer.update(mini_batch, plan, loss)
    if metrics["update/skipped"]:
        raise EngineError(
            "The loss or a gradient is not finite.",
            where="update",
            why=f"the loss is {metrics['loss/total']:.4g}, the norm of the gradient {metrics['grad_norm']:.4g}",
        )
    return Observation(scored.log_probs, metrics["grad_norm"])


def first_sequences(batch: RaggedBatch, at_least: int = 1) -> RaggedBatch:
    """Take the sequences whose whole logits are compared, or some more."""
    return batch.select(torch.arange(min(max(WHOLE_LOGITS, at_least), batch.num_sequences)))
