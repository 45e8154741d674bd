"""The loop of supervised fine-tuning: no generation and no rewards, on the engine and with the updates of RL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.algorithms.supervised_loss import SupervisedLoss
from anytron.checkpoint.resume import choose_start
from anytron.preflight.prepare import prepare_prompts
from anytron.preflight.validation import prepare_held_out
from anytron.seeds import derive_seed
from anytron.sinks.delivery import MetricSinks
from anytron.tracking.claim import ClaimedDirectory
from anytron.tracking.clock import Clock
from anytron.trainer.checkpointing import Checkpointing
from anytron.trainer.held_out import HeldOutLoss
from anytron.trainer.initial_model import write_random_model
from anytron.trainer.metrics import supervised_metrics
from anytron.trainer.non_finite import GuardedUpdates
from anytron.trainer.summary import RunSummary
from anytron.trainer.suspicions import Suspicions
from anytron.trainer.throughput import Throughput
from anytron.trainer.traces import Traces
from anytron.trainer.trained_models import save_trained_models
from anytron.trainer.trajectories import assemble_examples
from anytron.trainer.updates import UpdatePlan
from anytron.trainer.workers import kernel_suppliers, start_training

if TYPE_CHECKING:
    from anytron.checkpoint.resume import Start
    from anytron.config.schema import RunConfig
    from anytron.executor.protocol import Executor
    from anytron.preflight.prepare import PreparedPrompts
    from anytron.preflight.validation import HeldOutSet
    from anytron.tracking.progress import Progress
    from anytron.tracking.run_directory import RunDirectory
    from anytron.trainer.restarts import Restarts


def fine_tune(config: RunConfig, executor: Executor, progress: Progress, restarts: Restarts) -> RunSummary:
    """Train a policy from the responses of the data; otherwise as :func:`anytron.trainer.loop.train`."""
    prepared = prepare_prompts(config)
    examined = prepare_held_out(config, prepared)
    for remark in prepared.sampler.remarks:
        progress.note(remark)
    for one in examined:
        for remark in one.prepared.sampler.remarks:
            progress.note(f"validation set {one.section.name}: {remark}")
    with ClaimedDirectory(config, progress.note) as claimed:
        start = choose_start(config, claimed, progress.note)
        if start.finished is not None:
            progress.note(f"the run is finished after step {start.finished}: trainer.total_steps asks for no more")
            return RunSummary(claimed.path, start.finished, {}, 0.0)
        with start.open(config, claimed) as run:
            return _train(config, prepared, examined, start, run, executor, progress, restarts)


def _train(
    config: RunConfig,
    prepared: PreparedPrompts,
    examined: list[HeldOutSet],
    start: Start,
    run: RunDirectory,
    executor: Executor,
    progress: Progress,
    restarts: Restarts,
) -> RunSummary:
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
    validation = HeldOutLoss(config, examined, trainer, updates, run, checkpoints, progress, sinks, first=start.step)
    with checkpoints, sinks, Suspicions(config, run, progress) as suspicions:
        for step in range(start.step + 1, steps + 1):
            clock = Clock(progress.part)
            traces.begin(step)
            with clock.measure("checkpoint"):
                checkpoints.boundary(step - 1, 0, metrics)  # nothing is sampled from them
            validation.after(step - 1, clock)  # not interrupted: it uses the training ranks
            with checkpoints.abandonable():
                if validation.early_stop is not None:
                    break
                with clock.measure("data"):
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
            if config.trainer.save_hf:
                save_trained_models(config, trainer, prepared.tokenizer, run.path)
            if config.tracking.plot:
                run.plot()
            run.finished(done, validation.early_stop)
    return RunSummary(run.path, done, metrics, seconds, checkpoints.stopped_by, validation.early_stop)
