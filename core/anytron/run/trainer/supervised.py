"""The loop of supervised fine-tuning: no generation and no rewards, on the engine and with the updates of RL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.algorithms.supervised_loss import SupervisedLoss
from anytron.base.seeds import derive_seed
from anytron.record.sinks.delivery import MetricSinks
from anytron.record.tracking.clock import Clock
from anytron.run.trainer.checkpointing import Checkpointing
from anytron.run.trainer.held_out import HeldOutLoss
from anytron.run.trainer.initial_model import write_random_model
from anytron.run.trainer.metrics import supervised_metrics
from anytron.run.trainer.non_finite import GuardedUpdates
from anytron.run.trainer.summary import RunSummary
from anytron.run.trainer.suspicions import Suspicions
from anytron.run.trainer.throughput import Throughput
from anytron.run.trainer.traces import Traces
from anytron.run.trainer.trained_models import save_trained_models
from anytron.run.trainer.trajectories import assemble_examples
from anytron.run.trainer.updates import UpdatePlan
from anytron.run.trainer.validation_schedule import ValidationSchedule
from anytron.run.trainer.workers import kernel_suppliers, start_training

if TYPE_CHECKING:
    from anytron.config.schema import RunConfig
    from anytron.record.checkpoint.resume import Start
    from anytron.record.tracking.progress import Progress
    from anytron.record.tracking.run_directory import RunDirectory
    from anytron.run.preflight.prepare import PreparedPrompts
    from anytron.run.preflight.validation import HeldOutSet
    from anytron.run.trainer.restarts import Restarts
    from anytron.workers.executor.protocol import Executor


def fine_tune(
    config: RunConfig,
    prepared: PreparedPrompts,
    examined: list[HeldOutSet],
    start: Start,
    run: RunDirectory,
    executor: Executor,
    progress: Progress,
    restarts: Restarts,
) -> RunSummary:
    """Train a policy from the responses of the data; otherwise as :func:`anytron.run.trainer.loop.train`.

    Args:
        config: The run.
        prepared: Its examples.
        examined: Those of its validation.
        start: Where it begins.
        run: Its directory, opened there.
        executor: Starts the workers.
        progress: Is told of every step.
        restarts: Is told of finished ones.
    """
    write_random_model(config, prepared.tokenizer)
    trainer = start_training(executor, config)
    updates = UpdatePlan.from_config(config, trainer.topology[0])
    guarded = GuardedUpdates(trainer, updates, config, run.path, after=start.step)
    facts = trainer.describe()
    throughput = Throughput.of(config, facts)
    throughput.remark(progress.note)
    run.write_patches({"trainer": facts})
    checkpoints = Checkpointing(config, trainer, prepared, run, progress.note)
    checkpoints.restore(start)
    steps, loss = config.trainer.total_steps, SupervisedLoss()
    progress.start(steps, [str(rank["device"]) for rank in facts], kernel_suppliers(facts), start.step)
    done, metrics, seconds = start.step, run.last_metrics(), 0.0

    traces = Traces(config.trainer.profile, trainer, run.path, progress.note, progress.warn)
    sinks = MetricSinks(config, run, progress, after=start.step if start.in_place else None)
    held_out = HeldOutLoss(examined, trainer, updates, config.data.prompts_per_step)
    validation = ValidationSchedule(config, held_out, run, checkpoints, progress, sinks, first=start.step)
    with checkpoints, sinks, Suspicions(config, run, progress) as suspicions:
        for step in range(start.step + 1, steps + 1):
            clock = Clock(progress.part)
            with clock.measure("checkpoint"):
                checkpoints.boundary(step - 1, 0, metrics)  # nothing is sampled from them
            validation.after(step - 1, clock)  # not interrupted: it uses the training ranks
            if validation.early_stop is not None:
                break
            traces.begin(step)
            with checkpoints.abandonable(), clock.measure("data"):
                batch = assemble_examples(prepared.draw(config.data.prompts_per_step))

            with clock.measure("update"):
                batch = trainer.with_scores(batch, updates, reference=False)
                (mini_batch,) = updates.mini_batches(batch, derive_seed(config.trainer.seed, "mini-batches", step))
                outcome = guarded.update(mini_batch, loss, step, 1)
                suspicions.updated(mini_batch, outcome)

            metrics = supervised_metrics(step, batch, outcome, prepared.sampler.epochs, clock)
            speed = metrics["throughput/tokens_per_s"]
            metrics |= throughput.metrics(batch.lengths.tolist(), speed, clock, updates_policy=True)
            metrics |= trainer.peak_memory()
            run.write_metrics(metrics)
            sinks.write(metrics)
            traces.end(step)
            restarts.finished(step)
            done, seconds = step, seconds + clock.elapsed()
            progress.step(metrics)
            suspicions.stepped(metrics)

        progress.finish()
        checkpoints.finish(done, 0, metrics)
        if validation.due(done, last=True):
            validation.examine(done)
        with checkpoints.abandonable():
            run.require_place()
            if config.trainer.save_hf:
                save_trained_models(config, trainer, prepared.tokenizer, run.path)
            if config.tracking.plot:
                run.plot()
            run.finished(done, validation.early_stop)
    return RunSummary(run.path, done, metrics, seconds, checkpoints.stopped_by, validation.early_stop)
