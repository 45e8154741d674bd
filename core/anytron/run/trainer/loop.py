"""The RL loop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from anytron.algorithms.distillation import teacher_metrics, with_distillation
from anytron.algorithms.kl import adapted
from anytron.algorithms.policy_loss import PolicyLoss
from anytron.algorithms.registered import with_advantages
from anytron.algorithms.token_rewards import kl_metrics
from anytron.algorithms.value_loss import ValueLoss
from anytron.base.errors import LostDirectoryError, ProcessLost
from anytron.base.seeds import derive_seed
from anytron.base.temporary import WEIGHTS, PrivateDirectory
from anytron.record.checkpoint.resume import choose_start
from anytron.record.sinks.delivery import MetricSinks
from anytron.record.tracking.claim import ClaimedDirectory
from anytron.record.tracking.clock import Clock
from anytron.run.preflight.capabilities import generates_in_training
from anytron.run.preflight.earnable import require_earnable
from anytron.run.preflight.prepare import prepare, prepare_prompts
from anytron.run.preflight.validation import prepare_held_out, prepare_validation
from anytron.run.rollout.ahead import StepsAhead
from anytron.run.rollout.conversations import turns_of
from anytron.run.trainer.checkpointing import Checkpointing
from anytron.run.trainer.experience import ExperienceMaker
from anytron.run.trainer.initial_model import write_random_model
from anytron.run.trainer.metrics import check_agreement, step_metrics
from anytron.run.trainer.non_finite import GuardedUpdates
from anytron.run.trainer.restarts import Restarts
from anytron.run.trainer.skipped_steps import SkippedSteps
from anytron.run.trainer.summary import RunSummary
from anytron.run.trainer.supervised import fine_tune
from anytron.run.trainer.suspicions import Suspicions
from anytron.run.trainer.throughput import Throughput
from anytron.run.trainer.traces import Traces
from anytron.run.trainer.trained_models import save_trained_models
from anytron.run.trainer.updates import UpdatePlan
from anytron.run.trainer.validation import Validation
from anytron.run.trainer.validation_schedule import ValidationSchedule
from anytron.run.trainer.weight_transfer import WeightsInPlace, WeightTransfer
from anytron.run.trainer.workers import kernel_suppliers, start_workers
from anytron.task.environments.loading import start_environments

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anytron.config.algorithm import AlgorithmSection
    from anytron.config.schema import RunConfig
    from anytron.record.checkpoint.resume import Start
    from anytron.record.tracking.progress import Progress
    from anytron.record.tracking.run_directory import RunDirectory
    from anytron.run.preflight.prepare import PreparedPrompts, PreparedRun
    from anytron.run.preflight.validation import HeldOutSet, ValidationSet
    from anytron.run.trainer.experience import Experience
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron.sequences.batch import RaggedBatch
    from anytron.task.environments.pool import EnvironmentPool
    from anytron.task.rewards.scoring import RewardWorkers
    from anytron.workers.executor.protocol import Executor


def train(config: RunConfig, executor: Executor, progress: Progress) -> RunSummary:
    """Train a policy by reinforcement learning, or from the responses of the data, as ``algorithm.name`` says.

    It begins anew or with a checkpoint, as ``resume`` says.

    Everything that can be wrong with configuration and data is found before a worker starts.
    Metrics and samples are on disk as soon as they are known. When a training rank is lost, all processes start again
    and the run goes on from its last checkpoint; a rollout process alone is replaced.

    Args:
        config: The run, complete: paths absolute, edits of plugins applied, and checked
            (:func:`anytron.run.preflight.open_run.open_run`).
        executor: Starts the workers; the caller closes it.
        progress: Is told of every step.

    Raises:
        ConfigError: The configuration names something impossible or missing, or is not the one of the run to continue.
        DataError: Prompts, responses or rewards are not usable.
        EngineError: An engine cannot do what was asked, or the two engines disagree.
        CheckpointError: There is no usable checkpoint where one is needed.
        LostDirectoryError: The run's directory was removed or replaced.
        ResourceError: The disk is full.
        WorkerError: A worker process failed, or too many were lost in a row (``trainer.max_restarts``).
    """
    restarts = Restarts(config.trainer.max_restarts, Path(config.trainer.output_dir), progress.note)
    while True:
        try:
            return _attempt(config, executor, progress, restarts)
        except ProcessLost as error:
            executor.end()
            restarts.lost(error, "all processes start again, from the last checkpoint")
        config = config.model_copy(update={"resume": "auto"})


def _attempt(config: RunConfig, executor: Executor, progress: Progress, restarts: Restarts) -> RunSummary:
    shared = executor, progress, restarts
    if config.supervised:
        examples = prepare_prompts(config)
        held_out = prepare_held_out(config, examples)

        def learn(start: Start, run: RunDirectory) -> RunSummary:
            return fine_tune(config, examples, held_out, start, run, *shared)

        return _in_directory(config, examples, held_out, progress, restarts, learn)

    prepared = prepare(config)
    examined = prepare_validation(config, prepared)

    def reinforce(start: Start, run: RunDirectory) -> RunSummary:
        with (
            PrivateDirectory(WEIGHTS) as exchange,
            prepared.rewards.start(run.path / "logs", config.executor.start_timeout_s) as score_rewards,
            start_environments(config, run.path / "logs") as environments,
        ):
            require_earnable(config, prepared, examined, score_rewards, run.path / "logs" / "rehearsal", progress)
            if generates_in_training(config):
                transfer: WeightTransfer | WeightsInPlace = WeightsInPlace()
            else:
                transfer = WeightTransfer.from_config(config, executor, exchange.path, progress.note)
            return _train(config, prepared, examined, score_rewards, environments, start, run, transfer, *shared)

    return _in_directory(config, prepared, examined, progress, restarts, reinforce)


def _in_directory(
    config: RunConfig,
    prepared: PreparedPrompts,
    examined: Sequence[HeldOutSet | ValidationSet],
    progress: Progress,
    restarts: Restarts,
    carry_out: Callable[[Start, RunDirectory], RunSummary],
) -> RunSummary:
    """Take the run's directory, find out where the run begins, and carry it out, unless it is finished."""
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
                why="it had no run.json when all processes were started again after a process was lost",
                fix="start the run again",
            )
        start = choose_start(config, claimed, progress.note)
        if start.finished is not None:
            progress.note(f"the run is finished after step {start.finished}: trainer.total_steps asks for no more")
            return RunSummary(claimed.path, start.finished, {}, 0.0)
        with start.open(config, claimed, prepared.beginning) as run:
            return carry_out(start, run)


def _train(
    config: RunConfig,
    prepared: PreparedRun,
    examined: list[ValidationSet],
    score_rewards: RewardWorkers,
    environments: EnvironmentPool | None,
    start: Start,
    run: RunDirectory,
    transfer: WeightTransfer | WeightsInPlace,
    executor: Executor,
    progress: Progress,
    restarts: Restarts,
) -> RunSummary:
    critic, warm_up = config.critic, config.trainer.total_steps - config.policy_steps
    value_loss = None if critic is None else ValueLoss(critic.clip_value)
    seed, steps = config.trainer.seed, config.trainer.total_steps

    write_random_model(config, prepared.tokenizer)
    trainer, rollout, judge = start_workers(executor, config, restarts)
    turns = turns_of(config, prepared, rollout, environments)
    if config.rollout.max_staleness:
        trainer, judge = trainer.beside(turns), None if judge is None else judge.beside(turns)
    updates = UpdatePlan.from_config(config, trainer.topology[0])
    guarded = GuardedUpdates(trainer, updates, config, run.path, after=start.step)
    facts = trainer.describe()
    throughput = Throughput.of(config, facts)
    throughput.remark(progress.note)
    scoring = {} if judge is None else {"reward_model": judge.describe()}
    run.write_patches({"trainer": facts, "rollout": rollout.describe(), **scoring})
    ahead = StepsAhead(config, prepared, rollout, turns)
    maker = ExperienceMaker(config, ahead, score_rewards.beside(judge), prepared.tokenizer, run)
    checkpoints = Checkpointing(config, trainer, ahead, run, progress.note)
    checkpoints.restore(start)
    progress.start(steps, [str(rank["device"]) for rank in facts], kernel_suppliers(facts), start.step)
    done, version, seconds = start.step, start.weights_version, 0.0
    metrics = start.metrics(run.last_metrics())

    traces = Traces(config.trainer.profile, trainer, run.path, progress.note, progress.warn)
    sinks = MetricSinks(config, run, progress, after=start.step if start.in_place else None)
    examine = Validation(config, examined, rollout, turns, judge, run)
    validation = ValidationSchedule(config, examine, run, checkpoints, progress, sinks, first=start.step)
    skipped = SkippedSteps(config, metrics)
    with checkpoints, sinks, Suspicions(config, run, progress) as suspicions:
        for step in range(start.step + 1, steps + 1):
            clock = Clock(progress.part)
            with clock.measure("checkpoint"):
                checkpoints.boundary(step - 1, version, metrics)

            with clock.measure("rollout"), checkpoints.interruptible():
                ahead.settle()  # what is under way, if anything is: rollout.max_staleness
            with transfer.measured(clock):  # also before the first rollout: the training engine has the only weights
                version, memory = _send_weights(step, config, trainer, transfer, ahead)

            with checkpoints.interruptible():
                validation.after(step - 1, clock)
            if validation.early_stop is not None:
                break
            traces.begin(step)
            with checkpoints.abandonable():
                experience = maker.make(step, clock)
                signal = skipped.look(step, experience)

            samples = int(experience.used.sum()) or len(experience.samples)
            algorithm = adapted(config.corrected_algorithm, metrics, samples)
            if experience.teaches:
                with clock.measure("score"):
                    batch = _scored(experience, trainer, updates, config, algorithm, updates_policy=step > warm_up)

                with clock.measure("update"):
                    loss, outcomes = PolicyLoss(algorithm), []
                    mini_batches = updates.mini_batches(batch, derive_seed(seed, "mini-batches", step))
                    for place, mini_batch in enumerate(mini_batches, start=1):
                        outcome = (
                            {} if value_loss is None else guarded.update_critic(mini_batch, value_loss, step, place)
                        )
                        if step > warm_up:
                            outcome |= guarded.update(mini_batch, loss, step, place)
                        suspicions.updated(mini_batch, outcome)
                        outcomes.append(outcome)
            else:
                batch, outcomes = None, [skipped.outcome(policy=step > warm_up, critic=critic is not None)]

            memory |= {} if config.engine.offload else trainer.peak_memory()
            metrics = step_metrics(step, experience, batch, outcomes, clock)
            speed = metrics["throughput/tokens_per_s"]
            lengths = [] if batch is None else batch.lengths.tolist()
            metrics |= throughput.metrics(lengths, speed, clock, updates_policy=step > warm_up)
            metrics |= {**experience.metrics, **kl_metrics(batch, algorithm), **teacher_metrics(batch)}
            metrics |= {**signal, **memory, **ahead.age, **transfer.metrics}
            run.write_metrics(metrics)
            sinks.write(metrics)
            traces.end(step)
            restarts.finished(step)
            done, seconds = step, seconds + clock.elapsed()
            progress.step(metrics)
            suspicions.stepped(metrics)
            if step > warm_up and metrics["update/skipped"] < len(outcomes):  # otherwise there are no log-probs
                check_agreement(metrics, config.trainer.rollout_log_prob_tolerance)

        progress.finish()
        checkpoints.finish(done, version, metrics)
        with checkpoints.abandonable():
            if validation.due(done, last=True):
                _send_weights(done, config, trainer, transfer, ahead)
                validation.examine(done)
            run.require_place()
            if config.trainer.save_hf:
                save_trained_models(config, trainer, prepared.tokenizer, run.path)
            if config.tracking.plot:
                run.plot()
            run.finished(done, validation.early_stop)
    return RunSummary(run.path, done, metrics, seconds, checkpoints.stopped_by, validation.early_stop)


def _scored(
    experience: Experience,
    trainer: TrainingWorkers,
    updates: UpdatePlan,
    config: RunConfig,
    algorithm: AlgorithmSection,
    *,
    updates_policy: bool,
) -> RaggedBatch:
    """Give what a step's updates learn from: its samples, with values, log-probs and advantages."""
    batch = experience.batch(config.rollout.temperature)
    if config.critic is not None:
        batch = trainer.with_values(batch, updates)
    if updates_policy or updates.advantages_need_log_probs:
        reference, teacher = algorithm.kl_coefficient > 0.0, config.teacher is not None
        batch = trainer.with_scores(batch, updates, reference=reference, teacher=teacher)
    return with_distillation(with_advantages(batch, experience.used_rewards, algorithm), algorithm)


def _send_weights(
    step: int,
    config: RunConfig,
    trainer: TrainingWorkers,
    transfer: WeightTransfer | WeightsInPlace,
    ahead: StepsAhead,
) -> tuple[int, dict[str, float]]:
    """Give the rollout the training engine's weights; return their version, and the ranks' memory as metrics."""
    memory = trainer.offload() if config.engine.offload else {}
    every = config.rollout.check_weights_every
    return ahead.load_weights(transfer.of(trainer, compared=every > 0 and step % every == 0)), memory
