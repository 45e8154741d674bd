"""Let a training engine compute on the trajectories everything that the checks compare."""

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

    from anytron.batch import RaggedBatch
    from anytron.config.schema import RunConfig
    from anytron.trainer.workers import TrainingWorkers

WHOLE_LOGITS = 4
"""Number of sequences whose whole logits are compared: large vocabularies fill the memory."""


@dataclass(frozen=True)
class Observation:
    """Values of an engine, before any update.

    Attributes:
        logits: float32 ``[T', V]`` of the first sequences.
        log_probs: float32 ``[T]`` of all.
        grad_norm: L2 norm of the gradient of one update on all of them, before clipping.
    """

    logits: Tensor
    log_probs: Tensor
    grad_norm: float


def observe(trainer: TrainingWorkers, config: RunConfig, batch: RaggedBatch) -> Observation:
    """Compute all values; the update comes last, because it changes the weights."""
    plan = replace(UpdatePlan.from_config(config, trainer.topology[0]), epochs=1, count=1, group_size=SAMPLES)
    loss = PolicyLoss.from_config(config.algorithm)
    logits = trainer.logits(first_sequences(batch))
    scored = trainer.token_outputs(batch, plan, "policy")
    assert scored.log_probs is not None, "every engine computes log-probs"
    batch = batch.scored(scored)
    if loss.kl_coefficient > 0.0:
        batch = replace(batch, reference_log_probs=trainer.score(batch, plan, "reference"))
    mini_batch = next(plan.mini_batches(batch, config.trainer.seed))
    metrics = trainer.update(mini_batch, plan, loss)
    if metrics["update/skipped"]:
        raise EngineError(
            "The loss or a gradient is not finite.",
            where="update",
            why=f"the loss is {metrics['loss/total']:.4g}, the norm of the gradient {metrics['grad_norm']:.4g}",
        )
    return Observation(logits, scored.log_probs, metrics["grad_norm"])


def first_sequences(batch: RaggedBatch) -> RaggedBatch:
    """Take the sequences whose whole logits are compared."""
    return batch.select(torch.arange(min(WHOLE_LOGITS, batch.num_sequences)))
