"""Let a training engine compute on the trajectories what the checks compare."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from anytron.algorithms.losses import ValueLoss
from anytron.algorithms.policy_loss import PolicyLoss
from anytron.base.errors import EngineError
from anytron.run.trainer.updates import UpdatePlan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from anytron.config.schema import RunConfig
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron.sequences.batch import RaggedBatch, TokenOutputs

WHOLE_LOGITS = 4
"""Number of sequences whose whole logits, and whose gradients, are compared: they fill the memory."""
OTHER_TEMPERATURE = 0.7
"""Log-probs and entropies are compared at it too: at 1 nobody sees if the temperature is left out."""

VALUE_LOSS = ValueLoss()
"""The critic's loss."""
_VALUES_BEFORE = torch.tensor([0.8, -0.2, 0.3, -0.9])
"""Values before the update, less those now, in turn: within and beyond what the loss lets a value move."""
_RETURNS = torch.tensor([1.0, -1.5, 0.6])
"""Returns, less the values now."""


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
        outputs: ``log-probs``, and ``values`` if the run has a critic: float32 ``[T]`` of all sequences, before any
            update.
        grad_norms: L2 norms of the gradients of one update on all of them, before clipping; the policy's, and the
            critic's.
    """

    outputs: Mapping[str, Tensor]
    grad_norms: Mapping[str, float]


def temperatures(config: RunConfig) -> tuple[float, ...]:
    """The run's temperature, and another one."""
    return tuple(dict.fromkeys((config.rollout.temperature, OTHER_TEMPERATURE)))


def gradient_temperature(config: RunConfig) -> float:
    """The run's temperature, unless it is 1: then nobody sees if a gradient is not divided by it."""
    own = config.rollout.temperature
    return OTHER_TEMPERATURE if own == 1.0 else own


def plan_of(trainer: TrainingWorkers, config: RunConfig) -> UpdatePlan:
    """Plan one update on all of a batch, in the run's micro-batches."""
    plan = UpdatePlan.from_config(config, trainer.topology[0])
    return replace(plan, epochs=1, count=1)


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
    """Compute log-probs and values, and do one update of each model; the weights are others afterwards."""
    plan = plan_of(trainer, config)
    scored = trainer.token_outputs(batch, plan, "policy")
    assert scored.log_probs is not None, "every engine computes log-probs"
    loss = PolicyLoss(config.algorithm)
    batch = batch.scored(scored)
    if config.algorithm.kl_coefficient > 0.0:
        batch = replace(batch, reference_log_probs=trainer.score(batch, plan, "reference"))
    outputs = {"log-probs": scored.log_probs}
    if config.critic is not None:
        values = trainer.with_values(batch, plan).values
        assert values is not None, "the ranks compute them"
        outputs["values"], batch = values, off_value(batch, values)
    mini_batch = next(plan.mini_batches(batch, config.trainer.seed))
    metrics = trainer.update(mini_batch, plan, loss)
    _require_update(metrics, "update", "", "loss/total")
    grad_norms = {"gradient": metrics["grad_norm"]}
    if config.critic is not None:
        metrics = trainer.update_critic(mini_batch, plan, VALUE_LOSS)
        _require_update(metrics, "update_critic", "critic/", "critic/loss")
        grad_norms["critic's gradient"] = metrics["critic/grad_norm"]
    return Observation(outputs, grad_norms)


def _require_update(metrics: Mapping[str, float], where: str, prefix: str, loss: str) -> None:
    if metrics[f"{prefix}update/skipped"]:
        raise EngineError(
            "The loss or a gradient is not finite.",
            where=where,
            why=f"the loss is {metrics[loss]:.4g}, the norm of the gradient {metrics[f'{prefix}grad_norm']:.4g}",
        )


def off_value(batch: RaggedBatch, values: Tensor) -> RaggedBatch:
    """Let values before an update, and returns, be a little off a critic's values, float32 ``[T]``."""
    places = torch.arange(batch.num_tokens)
    before, returns = (values + offset[places % len(offset)] for offset in (_VALUES_BEFORE, _RETURNS))
    return replace(batch, values=before, returns=returns)


def first_mini_batch(config: RunConfig, trainer: TrainingWorkers, batch: RaggedBatch) -> RaggedBatch:
    """Take the first sequences as a mini-batch, at least one for each data-parallel replica."""
    plan = plan_of(trainer, config)
    return next(plan.mini_batches(first_sequences(batch, trainer.dp_size), config.trainer.seed))


def first_sequences(batch: RaggedBatch, at_least: int = 1) -> RaggedBatch:
    """Take the sequences whose whole logits are compared, or some more."""
    return batch.select(torch.arange(min(max(WHOLE_LOGITS, at_least), batch.num_sequences)))
