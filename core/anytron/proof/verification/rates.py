"""Compare the learning rates of a short run with the schedule that the configuration defines."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from anytron.proof.verification.comparisons import measured
from anytron.proof.verification.engines import VALUE_LOSS, off_value, plan_of
from anytron.proof.verification.gradients import own_batch
from anytron.proof.verification.hugging_face import LOSS

if TYPE_CHECKING:
    from anytron.base.results import Result
    from anytron.config.running import OptimizerSection
    from anytron.config.schema import RunConfig
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron.sequences.batch import RaggedBatch

STEPS = 4
"""Steps of the short run. A warm-up takes one of them, and so does a critic that is trained before the policy."""
_MOST_UPDATES = 2
"""Updates of a step: a schedule that counts steps where it should count updates shows with two."""
_TOLERANCE = 1e-6


def shortened(config: RunConfig, steps: int = STEPS, updates: int = _MOST_UPDATES) -> RunConfig:
    """Return a run of a few steps with the same kind of schedule.

    Args:
        config: Configuration of the run.
        steps: Steps of the short run, more than 2.
        updates: Most updates of each step.
    """
    own = config.algorithm.epochs * config.algorithm.mini_batches
    algorithm = config.algorithm.model_copy(update={"epochs": 1, "mini_batches": min(updates, own)})
    critic = config.critic
    if critic is not None:
        optimizer = _with_short_warmup(critic.optimizer)
        critic = critic.model_copy(update={"optimizer": optimizer, "warmup_steps": min(1, critic.warmup_steps)})
    trainer = config.trainer.model_copy(update={"total_steps": steps})
    sections = {"algorithm": algorithm, "critic": critic, "trainer": trainer}
    return config.model_copy(update={**sections, "optimizer": _with_short_warmup(config.optimizer)})


def _with_short_warmup(section: OptimizerSection) -> OptimizerSection:
    return section.model_copy(update={"warmup_steps": min(1, section.warmup_steps)})


def rates_of(section: OptimizerSection, steps: int, updates: int) -> list[float]:
    """Compute the learning rate of each update by definition, as docs/reference/config.md has it.

    Args:
        section: The configuration of the optimizer.
        steps: Steps in which the model is trained, more than ``section.warmup_steps``.
        updates: Updates of each step.
    """
    warm, whole = section.warmup_steps * updates, steps * updates
    low = section.lr if section.schedule == "constant" else section.min_lr
    found = []
    for number in range(whole):
        if number < warm:
            found.append(section.lr * number / warm)
            continue
        passed = (number - warm) / (whole - warm)
        left = 1.0 - passed if section.schedule == "linear" else (1.0 + math.cos(math.pi * passed)) / 2.0
        found.append(low + (section.lr - low) * left)
    return found


def check_rates(check: str, config: RunConfig, trainer: TrainingWorkers, batch: RaggedBatch) -> Result:
    """Compare the learning rate of each update of a short run with its definition, for policy and critic.

    Args:
        check: Name of the check.
        config: Configuration that the trainer was built with, from :func:`shortened`.
        trainer: The training ranks; the check changes their weights.
        batch: Sampled responses with advantages.
    """
    plan = plan_of(trainer, config)
    updates = config.algorithm.epochs * config.algorithm.mini_batches
    given = own_batch(config, trainer, plan, batch)
    wanted = {"policy": rates_of(config.optimizer, config.policy_steps, updates)}
    found = {"policy": [trainer.update(given, plan, LOSS)["lr"] for _ in wanted["policy"]]}
    sections = {"policy": config.optimizer}
    if config.critic is not None:
        values = trainer.with_values(given, plan).values
        assert values is not None, "the ranks compute them"
        given, sections["critic"] = off_value(given, values), config.critic.optimizer
        wanted["critic"] = rates_of(config.critic.optimizer, config.trainer.total_steps, updates)
        found["critic"] = [trainer.update_critic(given, plan, VALUE_LOSS)["critic/lr"] for _ in wanted["critic"]]
    worst, detail = 0.0, ""
    for model, rates in wanted.items():
        off = [abs(one - right) / sections[model].lr for one, right in zip(found[model], rates, strict=True)]
        place = max(range(len(off)), key=off.__getitem__)
        if not detail or off[place] > worst:
            worst = off[place]
            detail = (
                f"the {model}'s is {found[model][place]:.4g} in update {place + 1}, by definition {rates[place]:.4g}"
            )
    kind = f"{config.optimizer.schedule}, {(config.optimizer.warmup_steps and 'with') or 'without'} warm-up"
    return measured(check, worst, _TOLERANCE, f"{kind}: a run of {STEPS} steps of {updates} updates; {detail}")
