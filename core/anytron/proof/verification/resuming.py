"""Compare a run that is interrupted between two updates, and resumed from its checkpoint, with one that is not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from anytron.proof.checks import Inapplicable
from anytron.proof.verification.comparisons import joined, measured
from anytron.proof.verification.engines import plan_of
from anytron.proof.verification.updates import off_policy_batch, trained_models, trained_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from anytron.algorithms.contract import LossFunction
    from anytron.base.results import Result
    from anytron.config.schema import RunConfig
    from anytron.run.trainer.updates import UpdatePlan
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron.sequences.batch import RaggedBatch
    from anytron.workers.engines.training_engine import UpdatedModel

_TOLERANCE = 1e-2
"""Largest difference, as a part of a weight's step: a device that does not add up in the same order twice may turn the
steps of a few entries whose gradient is nearly 0."""
_BYTES = 20
"""Most bytes of a checkpoint for each trained weight: the weight, its float32 copy, two moments, and files' headers."""


def check_resume(check: str, config: RunConfig, rebuilt: Callable[[], TrainingWorkers], batch: RaggedBatch) -> Result:
    """Update, save, update; load what was saved into new engines and update again: both updates must be the same.

    Args:
        check: Name of the check.
        config: Configuration of the engines, with an update that can be measured and a rate that decays.
        rebuilt: Builds the training ranks' engines anew, with the weights that the run begins with.
        batch: Sampled responses with advantages.

    Raises:
        Inapplicable: The disk lacks room for a checkpoint, or the ranks share no disk.
        EngineError: A checkpoint could not be written or read.
    """
    directory = Path(config.trainer.output_dir)
    trainer = rebuilt()
    if len({host.id for host in trainer.group.hosts}) > 1:
        raise Inapplicable(f"the ranks are on several machines, and a checkpoint in {directory} must be on one")
    plan, models = plan_of(trainer, config), [model for model, _ in trained_models(config)]
    given = {model: off_policy_batch(config, trainer, plan, batch, model) for model in models}
    saved = directory / "verified-checkpoint"
    saved.mkdir()
    try:
        _update(trainer, plan, given)
        before = {model: trained_weights(trainer, config, model, directory) for model in models}
        _require_room(directory, before)
        trainer.save_checkpoint(str(saved), asynchronous=False)
        trainer.written_files(wait=True)
        _update(trainer, plan, given)
        wanted = {model: trained_weights(trainer, config, model, directory) for model in models}
        trainer = rebuilt()
        trainer.load_checkpoint(str(saved))
        _update(trainer, plan, given)
        found = {model: trained_weights(trainer, config, model, directory) for model in models}
    finally:
        shutil.rmtree(saved)
    return joined([compare_resumed(check, before[one], wanted[one], found[one]) for one in models])


def _require_room(directory: Path, weights: Mapping[UpdatedModel, Mapping[str, Tensor]]) -> None:
    needed = _BYTES * sum(one.numel() for model in weights.values() for one in model.values())
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise Inapplicable(f"a checkpoint may take {needed / 2**30:.1f} GiB, and {directory} has {free / 2**30:.1f}")


def _update(
    trainer: TrainingWorkers, plan: UpdatePlan, given: Mapping[UpdatedModel, tuple[RaggedBatch, LossFunction]]
) -> None:
    for model, (batch, loss) in given.items():
        if model == "policy":
            trainer.update(batch, plan, loss)
        else:
            trainer.update_critic(batch, plan, loss)


def compare_resumed(
    check: str, before: Mapping[str, Tensor], wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> Result:
    """Compare the weights after an update with those after the same update of a resumed run.

    Args:
        check: Name of the check.
        before: Weights by name when the checkpoint was saved.
        wanted: The weights after the next update, without an interruption.
        found: The weights after that update in the resumed run.
    """
    off = {}
    for name, right in wanted.items():
        step = float((right.double() - before[name].double()).norm())
        off[name] = float((found[name].double() - right.double()).norm()) / max(step, 1e-12)
    worst = max(off, key=off.__getitem__)
    wrong = sum(not value <= _TOLERANCE for value in off.values())
    if not wrong:
        detail = f"{len(off)} weights after a resume and an update, the worst is {worst}"
        return measured(check, off[worst], _TOLERANCE, detail)
    detail = f"{wrong} of {len(off)} weights differ after a resume and an update"
    detail += f", {worst} by {off[worst]:.2g} of its step"
    detail += ": the checkpoint lacks moments, their count or the schedule's progress, or they are not loaded"
    return measured(check, off[worst], _TOLERANCE, detail)
