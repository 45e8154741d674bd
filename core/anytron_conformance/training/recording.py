"""Record trajectories and updates of the platform ``cpu`` on this machine, for another platform to repeat."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file

from anytron.base.errors import EngineError
from anytron.config.schema import RunConfig
from anytron.proof.checks import Inapplicable
from anytron.proof.verification.engines import SAMPLES, Engines, draw_prompts, plan_of, sample_trajectories
from anytron.proof.verification.hugging_face import LOSS, off_policy
from anytron.run.preflight.prepare import prepare
from anytron.run.trainer.models import model_directory, write_random_model
from anytron.workers.executor.local import LocalExecutor
from anytron_conformance.subject import Source
from anytron_conformance.training.whole_runs import TASK, sections
from anytron_conformance.training_ranks import ENGINE, TrainingRanks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from anytron.run.trainer.updates import UpdatePlan
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron.sequences.batch import RaggedBatch

UPDATES = 3
REFERENCE = Source("cpu")
TEMPERATURE = 0.7

SGD: dict[str, dict[str, Any]] = {"optimizer": {"name": "sgd", "lr": 0.1, "clip_grad": 0.0}}
ADAM: dict[str, dict[str, Any]] = {
    # With a smaller epsilon a gradient that is 0 but for rounding would move a weight as far as any other.
    "optimizer": {"name": "adam", "lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "clip_grad": 1.0},
    "engine": {"distributed_optimizer": True},
}
HALF: dict[str, dict[str, Any]] = {**SGD, "model": {"dtype": "bfloat16"}}
COURSES: Mapping[str, dict[str, dict[str, Any]]] = {"SGD": SGD, "Adam": ADAM, "bfloat16": HALF}


@dataclass(frozen=True)
class Course:
    """Results of a sequence of updates.

    Attributes:
        metrics: Metrics of each update.
        start: Weights before the first update, by their names in the model's files.
        moved: Change of each weight by all updates, float32.
        log_probs: Log-probs after all updates, float32 ``[T]``.
    """

    metrics: list[dict[str, float]]
    start: dict[str, Tensor]
    moved: dict[str, Tensor]
    log_probs: Tensor


@dataclass(frozen=True)
class Recording:
    """Recorded updates of the platform ``cpu``.

    Attributes:
        model: Directory of the initial model.
        batch: Sampled responses with advantages, from a policy that differs slightly from the model.
        courses: Results of the updates, by the names of :data:`COURSES`.
    """

    model: Path
    batch: RaggedBatch
    courses: Mapping[str, Course]


def record(output: Path) -> Recording:
    """Sample responses with the platform ``cpu``, and update its model on them, in each of :data:`COURSES`.

    Args:
        output: A directory for files.

    Raises:
        AnytronError: The platform ``cpu`` cannot run the updates.
    """
    rollout = {"samples_per_prompt": SAMPLES, "max_new_tokens": 12, "min_new_tokens": 4, "temperature": TEMPERATURE}
    tree = {**sections(REFERENCE, output), "rollout": rollout, "rewards": [{"function": f"{TASK}:reward"}]}
    session = REFERENCE.open(ENGINE)
    config, _, _ = session.hooks.configure(RunConfig.model_validate(tree))
    prepared = prepare(config)
    write_random_model(config, prepared.tokenizer)
    ranks, model = TrainingRanks(REFERENCE, output), model_directory(config)
    with LocalExecutor(config, session) as executor:
        engines = Engines(config, executor)
        batch = sample_trajectories(config, prepared, engines.rollout(), draw_prompts(config, prepared)).batch
        trainer = engines.trainer()
        batch = off_policy(batch, trainer.score(batch, plan_of(trainer, config), "policy"))
        courses = {}
        for name, changes in COURSES.items():
            try:
                own = ranks.config(model, with_micro_batches(changes))
            except Inapplicable as refused:  # of the platform under test nothing would be known
                raise EngineError(
                    "Updates cannot be recorded with the platform cpu.",
                    why=refused.reason,
                    fix="disable the plugin that refuses them: ANYTRON_DISABLE_PLUGINS=NAME",
                ) from refused
            courses[name] = follow(engines.trainer_to_update(own), own, batch, output)
    return Recording(model, batch, courses)


def with_micro_batches(changes: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Set the size of micro-batches so that an update has several, with several sequences each."""
    return {**changes, "engine": {"max_tokens_per_micro_batch": 40, **changes.get("engine", {})}}


def mini_batches(plan: UpdatePlan, batch: RaggedBatch) -> Iterator[RaggedBatch]:
    """Divide the batch into one mini-batch for each update."""
    return (one.batch for one in replace(plan, count=UPDATES).mini_batches(batch, seed=0))


def follow(trainer: TrainingWorkers, config: RunConfig, batch: RaggedBatch, directory: Path) -> Course:
    """Do the updates on a trainer, and return the results.

    Args:
        trainer: A newly built trainer.
        config: Configuration of the trainer.
        batch: The recorded batch.
        directory: Directory for the files of the weights.
    """
    plan = plan_of(trainer, config)
    start = exported(trainer, directory)
    metrics = [trainer.update(mini_batch, plan, LOSS) for mini_batch in mini_batches(plan, batch)]
    moved = moves(start, exported(trainer, directory))
    return Course(metrics, start, moved, trainer.score(batch, plan, "policy"))


def moves(start: Mapping[str, Tensor], end: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the change of each weight, float32."""
    return {name: end[name].float() - tensor.float() for name, tensor in start.items()}


def exported(trainer: TrainingWorkers, directory: Path) -> dict[str, Tensor]:
    """Export all weights, adapters merged."""
    file = directory / "weights.safetensors"
    trainer.export_weights(str(file))
    weights = load_file(file)
    file.unlink()
    return weights
