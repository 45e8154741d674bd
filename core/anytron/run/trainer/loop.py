"""The RL loop, and all that a run does before and after the RL loop or the loop of supervised fine-tuning."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from anytron.algorithms.kl import adapted, kl_metrics, teacher_metrics, with_distillation
from anytron.algorithms.losses import ValueLoss
from anytron.algorithms.policy_loss import PolicyLoss
from anytron.algorithms.registered import with_advantages
from anytron.base.errors import LostDirectoryError, ProcessLost
from anytron.base.files import WEIGHTS, PrivateDirectory
from anytron.base.garbage import collect_all
from anytron.base.seeds import derive_seed
from anytron.record.checkpoint.resume import choose_start
from anytron.record.tracking.claim import ClaimedDirectory
from anytron.run.groups import all_groups
from anytron.run.preflight.capabilities import generates_in_training
from anytron.run.preflight.prepare import prepare, prepare_held_out, prepare_prompts, prepare_validation
from anytron.run.preflight.rehearsal import require_earnable
from anytron.run.rollout.endpoint import endpoint_key, open_endpoint
from anytron.run.rollout.prefetch import RolloutPrefetch
from anytron.run.rollout.scaling import Scaling
from anytron.run.rollout.turns import turns_of
from anytron.run.trainer.alarms import SkippedSteps
from anytron.run.trainer.experience import ExperienceMaker
from anytron.run.trainer.frame import Attempt, RunFrame, RunSummary
from anytron.run.trainer.interruptions import Restarts
from anytron.run.trainer.metrics import check_agreement, devices_of, step_metrics
from anytron.run.trainer.models import write_random_model
from anytron.run.trainer.non_finite import GuardedUpdates
from anytron.run.trainer.supervised import fine_tune
from anytron.run.trainer.updates import UpdatePlan
from anytron.run.trainer.validation import Validation
from anytron.run.trainer.weight_transfer import WeightsInPlace, WeightTransfer
from anytron.run.trainer.workers import start_workers
from anytron.task.environments.pool import start_environments

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anytron.config.algorithm import AlgorithmSection
    from anytron.config.schema import RunConfig
    from anytron.record.tracking.progress import Progress
    from anytron.run.preflight.prepare import HeldOutSet, PreparedPrompts, PreparedRun, ValidationSet
    from anytron.run.trainer.experience import Experience
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron.sequences.batch import RaggedBatch
    from anytron.serving.endpoint import Endpoint
    from anytron.task.environments.pool import EnvironmentPool
    from anytron.task.rewards.scoring import RewardWorkers
    from anytron.workers.executor.protocol import Executor


def train(config: RunConfig, executor: Executor, progress: Progress) -> RunSummary:
    """Train a policy by reinforcement learning or supervised fine-tuning, as ``algorithm.name`` says.

    The key ``resume`` decides whether the run starts anew or from a checkpoint.

    Configuration and data are fully checked before an engine is built. Meanwhile the processes import their engines,
    also those of a run that turns out to be finished, or to be refused. Metrics and samples are on disk as soon as they
    are known. When a training rank is lost, all processes start again and the run goes on from its last checkpoint.
    When a rollout process is lost, only this process is replaced.

    Args:
        config: The run, complete: paths absolute, edits of plugins applied, and checked
            (:func:`anytron.run.preflight.open_run.open_run`).
        executor: Starts the workers; the caller closes it.
        progress: Display of the steps.

    Raises:
        ConfigError: The configuration names something impossible or missing, or differs from the run to continue.
        DataError: Prompts, responses or rewards are not usable.
        EngineError: An engine cannot do what was asked, or rollout and training compute different log-probs.
        CheckpointError: A checkpoint is needed, and none is usable.
        LostDirectoryError: The run's directory was removed or replaced.
        ResourceError: The disk is full.
        WorkerError: A worker process failed, or too many were lost in a row (``trainer.max_restarts``).
    """
    restarts = Restarts(config.trainer.max_restarts, Path(config.trainer.output_dir), progress.note)
    key = endpoint_key(config)
    while True:
        try:
            return _attempt(config, executor, progress, restarts, key)
        except ProcessLost as error:
            executor.end()
            restarts.lost(error, "all processes start again, from the last checkpoint")
        finally:
            collect_all()  # what the attempt leaves
        config = config.model_copy(update={"resume": "auto"})


def _attempt(
    config: RunConfig, executor: Executor, progress: Progress, restarts: Restarts, key: str | None
) -> RunSummary:
    executor.warm_up(all_groups(config))
    if config.supervised:
        examples = prepare_prompts(config, progress.note)
        held_out = prepare_held_out(config, examples)
        with _begun(config, executor, progress, restarts, examples, held_out) as attempt:
            return attempt if isinstance(attempt, RunSummary) else fine_tune(attempt, examples, held_out)
    prepared = prepare(config, progress.note)
    examined = prepare_validation(config, prepared)
    with _begun(config, executor, progress, restarts, prepared, examined) as attempt:
        return attempt if isinstance(attempt, RunSummary) else _reinforce(attempt, prepared, examined, key)


@contextlib.contextmanager
def _begun(
    config: RunConfig,
    executor: Executor,
    progress: Progress,
    restarts: Restarts,
    prepared: PreparedPrompts,
    examined: Sequence[HeldOutSet | ValidationSet],
) -> Iterator[Attempt | RunSummary]:
    """Take the run's directory and find where the run begins; yield the attempt, or the summary of a finished run."""
    for remark in [*prepared.remarks, *prepared.sampler.remarks]:
        progress.note(remark)
    for one in examined:
        for remark in one.prepared.sampler.remarks:
            progress.note(f"{one.section.title}: {remark}")
    with ClaimedDirectory(config, progress.note) as claimed:
        if restarts.has_lost and claimed.record is None:  # it is not locked between two attempts
            raise LostDirectoryError(
                "The output directory was removed or replaced.",
                where=f"trainer.output_dir = {claimed.path}",
                why="run.json was missing when the run restarted its processes after one of them was lost",
                fix="start the run again with resume=auto",
            )
        start = choose_start(config, claimed, progress.note)
        if start.finished is not None:
            progress.note(f"the run has finished: step {start.finished} is the last of trainer.total_steps")
            yield RunSummary(claimed.path, start.finished, {}, 0.0)
            return
        with start.open(config, claimed, prepared.beginning) as run:
            yield Attempt(config, executor, progress, restarts, start, run)


def _reinforce(attempt: Attempt, prepared: PreparedRun, examined: list[ValidationSet], key: str | None) -> RunSummary:
    """Start the processes of rewards and environments and the endpoint, and train by reinforcement learning."""
    config, executor, progress, logs = attempt.config, attempt.executor, attempt.progress, attempt.run.path / "logs"
    with (
        PrivateDirectory(WEIGHTS) as exchange,
        prepared.rewards.start(logs, config.executor.start_timeout_s) as score_rewards,
        open_endpoint(config, prepared, key, progress.note) as endpoint,
        start_environments(config, logs) as environments,
    ):
        require_earnable(config, prepared, examined, score_rewards, logs / "rehearsal", progress)
        if generates_in_training(config):
            transfer: WeightTransfer | WeightsInPlace = WeightsInPlace()
        else:
            transfer = WeightTransfer.from_config(config, executor, exchange.path, progress.note)
        return _train(attempt, prepared, examined, score_rewards, environments, endpoint, transfer)


def _train(
    attempt: Attempt,
    prepared: PreparedRun,
    examined: list[ValidationSet],
    score_rewards: RewardWorkers,
    environments: EnvironmentPool | None,
    endpoint: Endpoint | None,
    transfer: WeightTransfer | WeightsInPlace,
) -> RunSummary:
    config, run = attempt.config, attempt.run
    write_random_model(config, prepared.tokenizer)
    trainer, rollout, judge = start_workers(attempt.executor, config, attempt.restarts)
    rollout.guests = None if endpoint is None else endpoint.desk
    turns = turns_of(config, prepared, rollout, environments, endpoint)
    if config.rollout.max_staleness:
        trainer, judge = trainer.while_generating(turns), None if judge is None else judge.while_generating(turns)
    prefetch = RolloutPrefetch(config, prepared, rollout, turns)
    maker = ExperienceMaker(config, prefetch, score_rewards.beside(judge), prepared.tokenizer, run)
    validation = Validation(config, examined, rollout, turns, judge, run, endpoint)
    scaling = Scaling(run.path, rollout, attempt.executor, config, attempt.progress.note, attempt.progress.warn)
    if not attempt.restarts.has_lost:
        scaling.forget()
    facts = {"rollout": rollout.describe()} | ({} if judge is None else {"reward_model": judge.describe()})
    frame = RunFrame(attempt, trainer, prefetch, prepared.tokenizer, validation, facts)
    learner = _Learner(config, trainer, frame, attempt.start.step)
    skipped = SkippedSteps(config, frame.metrics)

    def send_weights(step: int) -> dict[str, float]:
        """Send the training engine's weights to the rollout; return the ranks' memory as metrics."""
        memory = trainer.offload() if config.engine.offload else {}
        every = config.rollout.check_weights_every
        frame.weights_version = prefetch.load_weights(transfer.of(trainer, compared=every > 0 and step % every == 0))
        return memory

    with frame:
        for step in frame.steps():
            with step.clock.measure("rollout"), frame.checkpoints.interruptible():
                prefetch.finish_in_flight()  # what is under way, if anything is: rollout.max_staleness
                if not generates_in_training(config) and scaling.follow():
                    frame.throughput = replace(frame.throughput, devices=devices_of(config, scaling.replicas))
            with transfer.measured(step.clock):  # also before the first rollout: it has no weights yet
                memory = send_weights(step.number)
            if not frame.begin(step):
                break
            with frame.checkpoints.abandonable():
                experience = maker.make(step.number, step.clock)
                signal = skipped.look(step.number, experience)

            updates_policy = learner.updates_policy(step.number)
            algorithm = adapted(config.corrected_algorithm, frame.metrics, experience.size)
            if experience.teaches:
                with step.clock.measure("score"):
                    batch = learner.score(experience, algorithm, step.number)
                with step.clock.measure("update"):
                    outcomes = learner.update(batch, algorithm, step.number)
            else:
                batch, outcomes = None, [skipped.outcome(policy=updates_policy, critic=config.critic is not None)]

            memory |= {} if config.engine.offload else trainer.peak_memory()
            metrics = step_metrics(step.number, experience, batch, outcomes, step.clock)
            lengths = [] if batch is None else batch.lengths.tolist()
            metrics |= frame.throughput.metrics(lengths, metrics, step.clock, updates_policy=updates_policy)
            metrics |= {**experience.metrics, **kl_metrics(batch, algorithm), **teacher_metrics(batch)}
            asked = {} if endpoint is None else endpoint.metrics()
            frame.record(step, {**metrics, **signal, **memory, **prefetch.age, **transfer.metrics, **asked})
            if updates_policy and metrics["update/skipped"] < len(outcomes):  # otherwise there are no log-probs
                check_agreement(metrics, config.trainer.rollout_log_prob_tolerance)
        frame.finish(send_weights)
    return frame.summary()


class _Learner:
    """Scores a step's experience and updates the models with it.

    Args:
        config: The run's configuration.
        trainer: The training engine.
        frame: The run's frame, whose alarms check every update.
        after: Number of training steps that were completed before the run started or was resumed; 0 = no update has
            changed the weights yet.
    """

    def __init__(self, config: RunConfig, trainer: TrainingWorkers, frame: RunFrame, after: int) -> None:
        self._config, self._trainer, self._alarms = config, trainer, frame.alarms
        self._plan = UpdatePlan.from_config(config, trainer.topology[0])
        self._guarded = GuardedUpdates(trainer, self._plan, config, frame.directory, after=after)
        self._value_loss = None if config.critic is None else ValueLoss(config.critic.clip_value)
        self._bitwise = str(frame.directory / "config.yaml") if config.engine.on_policy == "bitwise" else ""

    def updates_policy(self, step: int) -> bool:
        """Whether a step updates the policy: not in the critic's warm-up."""
        return step > self._config.trainer.total_steps - self._config.policy_steps

    def score(self, experience: Experience, algorithm: AlgorithmSection, step: int) -> RaggedBatch:
        """Make the batch that a step learns from, with values, log-probs and advantages.

        Raises:
            DataError: The estimator of advantages raises, or returns an invalid value.
            EngineError: The engine returned a wrong number of rows for a micro-batch.
        """
        config, trainer, plan = self._config, self._trainer, self._plan
        batch = experience.batch(config.rollout.temperature)
        if config.critic is not None:
            batch = trainer.with_values(batch, plan)
        if self.updates_policy(step) or plan.advantages_need_log_probs:
            reference, teacher = algorithm.kl_coefficient > 0.0, config.teacher is not None
            batch = trainer.with_scores(batch, plan, reference=reference, teacher=teacher)
        return with_distillation(with_advantages(batch, experience.used_rewards, algorithm), algorithm)

    def update(self, batch: RaggedBatch, algorithm: AlgorithmSection, step: int) -> list[dict[str, float]]:
        """Update critic and policy with every mini-batch; return the metrics of each update."""
        loss, outcomes = PolicyLoss(algorithm, self._bitwise), []
        mini_batches = self._plan.mini_batches(batch, derive_seed(self._config.trainer.seed, "mini-batches", step))
        for place, mini_batch in enumerate(mini_batches, start=1):
            outcome: dict[str, float] = {}
            if self._value_loss is not None:
                outcome = self._guarded.update_critic(mini_batch, self._value_loss, step, place)
            if self.updates_policy(step):
                outcome |= self._guarded.update(mini_batch, loss, step, place)
            self._alarms.updated(mini_batch, outcome)
            outcomes.append(outcome)
        return outcomes
