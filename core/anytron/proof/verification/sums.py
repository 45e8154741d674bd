"""Check that an update adds up the gradients of its micro-batches in float32, whatever dtype the run computes in.

The gradient of one more micro-batch is small beside the sum of all others. A sum in bfloat16 keeps 8 binary digits and
loses it, without a message. So one sequence is computed with weight 1 and then, in micro-batches of their own, copies
of it with a weight that such a sum cannot see. Together they are 1/16 of the first, whatever its gradient is.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from anytron.base.results import Result
from anytron.proof.verification.comparisons import largest, measured
from anytron.proof.verification.engines import plan_of
from anytron.proof.verification.gradients import SMALL, computed_gradients
from anytron.proof.verification.hugging_face import off_policy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from anytron.config.schema import RunConfig
    from anytron.run.trainer.updates import UpdatePlan
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron.sequences.batch import RaggedBatch

COPIES, WEIGHT = 32, 2.0**-9
"""Micro-batches behind the first on each replica, and the weight of each: too little for bfloat16 to add it to 1."""
LIMIT = COPIES * WEIGHT / 2
"""Allowed relative difference: half of what the copies add. Two computations of the same gradient differ by less."""
ALONE = 1
"""``max_tokens`` of a plan that gives each sequence its own micro-batch."""


def copies_of_longest(batch: RaggedBatch, count: int) -> RaggedBatch:
    """Repeat the longest sequence of a batch ``count`` times; the copies are in no group."""
    index = torch.full((count,), int(batch.lengths.argmax()))
    return replace(batch, groups=None, responses=None).select(index)


def prepared(trainer: TrainingWorkers, config: RunConfig, plan: UpdatePlan, batch: RaggedBatch) -> RaggedBatch:
    """Return the batch with everything that a loss reads, slightly off the engine's present weights."""
    batch = next(plan.mini_batches(batch, config.trainer.seed)).batch
    scored = trainer.token_outputs(batch, plan, "policy")
    assert scored.log_probs is not None, "every engine computes log-probs"
    batch = batch.scored(scored) if plan.replays_scoring else batch
    return off_policy(batch, scored.log_probs)


def check_sums(check: str, config: RunConfig, trainer: TrainingWorkers, batch: RaggedBatch) -> Result:
    """Compare the gradient of a sequence and many light copies of it with the gradient of the sequence alone.

    Args:
        check: Name of the check.
        config: Configuration of the run.
        trainer: The training ranks, whose engine declares ``gradients``; the check changes no weights.
        batch: Sampled responses with advantages.

    Raises:
        EngineError: The engine cannot compute the gradients.
    """
    replicas = trainer.dp_size
    plan, directory = replace(plan_of(trainer, config), max_tokens=ALONE), Path(config.trainer.output_dir)
    given = prepared(trainer, config, plan, copies_of_longest(batch, replicas))
    whole = given.select(torch.zeros(replicas * (1 + COPIES), dtype=torch.int64))  # equal in every number
    assert whole.loss_weights is not None
    weights = torch.full((whole.num_sequences,), WEIGHT)
    weights[:replicas] = 1.0  # the first micro-batch of each replica
    whole = replace(whole, loss_weights=whole.loss_weights * weights.repeat_interleave(whole.lengths))
    first = whole.select(torch.arange(replicas))
    found, alone = (computed_gradients(trainer, plan, one, directory)[0] for one in (whole, first))
    return compare_sums(check, found, alone)


def compare_sums(check: str, found: Mapping[str, Tensor], alone: Mapping[str, Tensor]) -> Result:
    """Compare gradients with ``1 + COPIES * WEIGHT`` times those of the first micro-batches alone.

    Args:
        check: Name of the check.
        found: Gradients of all micro-batches, float32, by the weights' names.
        alone: Gradients of the first micro-batch of each replica.
    """
    size = max((largest(gradient) for gradient in alone.values()), default=0.0)
    if size == 0.0:
        return Result(check, "skipped", "all gradients are 0")
    factor = 1.0 + COPIES * WEIGHT
    differences = {
        name: largest(found[name] - factor * gradient) / largest(gradient)
        for name, gradient in alone.items()
        if largest(gradient) > SMALL * size
    }
    worst = max(differences, key=lambda name: differences[name])
    wrong = [name for name, difference in differences.items() if not difference <= LIMIT]
    what = f"gradients of one sequence and of {COPIES} copies of it with {WEIGHT:.2g} of its weight"
    if not wrong:
        return measured(check, differences[worst], LIMIT, f"{len(differences)} {what}, the worst is {worst}")
    detail = (
        f"{len(wrong)} of {len(differences)} {what} are not the sum, {worst} by {differences[worst]:.2g}: small "
        "gradients are lost beside large ones, so look at the dtype in which gradients are added up and reduced, "
        "which must be float32"
    )
    return measured(check, differences[worst], LIMIT, detail)
