"""The frame of both loops: everything around the steps that does not depend on what a step computes.

A loop fills it in::

    with frame:
        for step in frame.steps():        # the checkpoint of the previous step, if one is due
            if not frame.begin(step):     # validation may end the run
                break
            metrics = ...                 # the algorithm
            frame.record(step, metrics)   # directory, sinks, traces, restarts, progress, alarms
        frame.finish()                    # the last checkpoint, the last validation, the trained models
    return frame.summary()
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from anytron.base.garbage import exempt_objects
from anytron.record.sinks.delivery import MetricSinks
from anytron.record.tracking.claim import PROFILE
from anytron.record.tracking.progress import Clock
from anytron.run.trainer.alarms import Alarms
from anytron.run.trainer.checkpointing import Checkpointing
from anytron.run.trainer.metrics import Throughput
from anytron.run.trainer.models import save_trained_models
from anytron.run.trainer.validation import ValidationSchedule
from anytron.run.trainer.workers import kernel_suppliers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from types import TracebackType
    from typing import Any

    from transformers import PreTrainedTokenizerBase
    from typing_extensions import Self

    from anytron.config.running import ProfileSection
    from anytron.config.schema import RunConfig
    from anytron.record.checkpoint.resume import Start
    from anytron.record.tracking.progress import Progress
    from anytron.record.tracking.run_directory import RunDirectory
    from anytron.run.trainer.checkpointing import PlaceInData
    from anytron.run.trainer.interruptions import Restarts
    from anytron.run.trainer.workers import TrainingWorkers
    from anytron.workers.executor.protocol import Executor


@dataclass(frozen=True)
class Attempt:
    """One attempt at a run, which lasts until the run ends or a process is lost.

    Attributes:
        config: The run's configuration.
        executor: Executor that starts the workers.
        progress: Display of the steps.
        restarts: Counts the processes lost in a row, and decides whether the run goes on after a loss.
        start: Where the attempt begins.
        run: The run's directory, opened to continue from ``start``.
    """

    config: RunConfig
    executor: Executor
    progress: Progress
    restarts: Restarts
    start: Start
    run: RunDirectory


@dataclass(frozen=True)
class RunSummary:
    """The result of a run.

    Attributes:
        output_dir: The run's directory.
        steps: Number of completed training steps, including the steps before a resume.
        metrics: The metrics of the last step.
        seconds: Wall-clock time of the training steps of this process, without start-up and saving the model.
        stopped_by: Name of the signal that ended the run before its last step or before its model was saved; None if no
            signal did.
        early_stop: Why validation ended the run before its last step; None if it did not.
    """

    output_dir: Path
    steps: int
    metrics: Mapping[str, float]
    seconds: float
    stopped_by: str | None = None
    early_stop: str | None = None


class Step(NamedTuple):
    """A training step.

    Attributes:
        number: Number of the step, from 1.
        clock: Clock for the parts of the step.
    """

    number: int
    clock: Clock


class RunFrame:
    """Saves checkpoints of a run, writes and shows its metrics, and ends it. A context manager around the steps.

    Args:
        attempt: The run, and where it begins.
        trainer: The training engine.
        data: Sampler of the prompts, and its position in the data.
        tokenizer: Tokenizer that is saved with trained models.
        measure: Function that validates the policy after a number of completed steps and returns the metrics.
        facts: Facts about the other engines, for the run's records.

    Attributes:
        directory: The run's directory.
        checkpoints: The checkpointing, which decides when a signal may interrupt a step.
        throughput: Throughput of the steps.
        alarms: Checks of every update and every step.
        metrics: The metrics of the last step.
        weights_version: Number of completed optimizer updates of the weights that generated the last responses.
    """

    def __init__(
        self,
        attempt: Attempt,
        trainer: TrainingWorkers,
        data: PlaceInData,
        tokenizer: PreTrainedTokenizerBase,
        measure: Callable[[int], dict[str, float]],
        facts: Mapping[str, Any],
    ) -> None:
        config, start, run, progress = attempt.config, attempt.start, attempt.run, attempt.progress
        self._attempt, self._trainer, self._tokenizer = attempt, trainer, tokenizer
        self.directory = run.path
        ranks = trainer.describe()
        self.throughput = Throughput.of(config, ranks)
        self.throughput.remark(progress.note)
        run.write_patches({"trainer": ranks, **facts})
        self.checkpoints = Checkpointing(config, trainer, data, run, progress.note)
        self.checkpoints.restore(start)
        devices = [str(rank["device"]) for rank in ranks]
        progress.start(config.trainer.total_steps, devices, kernel_suppliers(ranks), start.step)
        self._traces = Traces(config.trainer.profile, trainer, run.path, progress.note, progress.warn)
        self._sinks = MetricSinks(config, run, progress, after=start.step if start.in_place else None)
        self._validation = ValidationSchedule(
            config, measure, run, self.checkpoints, progress, self._sinks, first=start.step
        )
        self.alarms = Alarms(config, run, progress)
        self.weights_version, self.metrics = start.weights_version, start.metrics(run.last_metrics())
        self._done, self._seconds = start.step, 0.0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        for part in (self.checkpoints, self._sinks, self.alarms):
            self._stack.enter_context(part)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, error, trace)

    def steps(self) -> Iterator[Step]:
        """Yield the steps one by one; before each, save the checkpoint of the previous step if one is due."""
        exempt_objects()  # prompts, the tokenizer and all modules stay for the whole run
        for number in range(self._attempt.start.step + 1, self._attempt.config.trainer.total_steps + 1):
            step = Step(number, Clock(self._attempt.progress.part))
            with step.clock.measure("checkpoint"):
                self.checkpoints.boundary(number - 1, self.weights_version, self.metrics)
            yield step

    def begin(self, step: Step) -> bool:
        """Validate the policy if that is due, and begin the step's traces; False = the run ends before this step."""
        with self._validating():
            self._validation.after(step.number - 1, step.clock)
        if self._validation.early_stop is not None:
            return False
        self._traces.begin(step.number)
        return True

    def record(self, step: Step, metrics: dict[str, float]) -> None:
        """Write, send and show the metrics of a finished step, and warn of suspicious ones."""
        self.metrics = metrics
        self._attempt.run.write_metrics(metrics)
        self._sinks.write(metrics)
        self._traces.end(step.number)
        self._attempt.restarts.finished(step.number)
        self._done, self._seconds = step.number, self._seconds + step.clock.elapsed()
        self._attempt.progress.step(metrics)
        self.alarms.stepped(metrics)

    def finish(self, prepare_validation: Callable[[int], object] | None = None) -> None:
        """Save the last checkpoint, validate, and save the trained models.

        Args:
            prepare_validation: Called before the last validation with the number of completed steps; None = not needed.
        """
        config, run, done = self._attempt.config, self._attempt.run, self._done
        self._attempt.progress.finish()
        self.checkpoints.finish(done, self.weights_version, self.metrics)
        if self._validation.due(done, last=True):
            with self._validating():
                if prepare_validation is not None:
                    prepare_validation(done)
                self._validation.examine(done)
        with self.checkpoints.abandonable():
            run.require_place()
            if config.trainer.save_hf:
                save_trained_models(config, self._trainer, self._tokenizer, run.path)
            if config.tracking.plot:
                run.plot()
            run.finished(done, self._validation.early_stop)

    def summary(self) -> RunSummary:
        """Return the result of the run, after it has ended."""
        stopped_by, early_stop = self.checkpoints.stopped_by, self._validation.early_stop
        return RunSummary(self._attempt.run.path, self._done, self.metrics, self._seconds, stopped_by, early_stop)

    def _validating(self) -> contextlib.AbstractContextManager[None]:
        """Let a signal interrupt a validation, unless the training ranks carry it out."""
        return contextlib.nullcontext() if self._attempt.config.supervised else self.checkpoints.interruptible()


class Traces:
    """Lets training ranks record steps with torch's profiler (``trainer.profile``).

    An error of the profiler is reported and does not stop the run.

    Args:
        profile: Steps and ranks to record; None = nothing is recorded.
        trainer: The ranks.
        directory: The run directory.
        tell: Called with a message about each trace.
        warn: Called with the reason why a trace is missing.
    """

    def __init__(
        self,
        profile: ProfileSection | None,
        trainer: TrainingWorkers,
        directory: Path,
        tell: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._profile, self._trainer, self._directory = profile, trainer, directory
        self._tell, self._warn = tell, warn

    def begin(self, step: int) -> None:
        """Begin to record, if this step is to be recorded."""
        if self._profile is not None and step in self._profile.steps:
            self._trainer.begin_traces(self._profile.ranks, stacks=self._profile.stacks, memory=self._profile.memory)

    def end(self, step: int) -> None:
        """Write a file for each recorded rank, ``profile/step-00003-rank-0.json.gz``."""
        if self._profile is None or step not in self._profile.steps:
            return
        paths = [self._directory / PROFILE / f"step-{step:05d}-rank-{rank}.json.gz" for rank in self._profile.ranks]
        largest = int(self._profile.max_mib * 2**20)
        reasons = self._trainer.end_traces(dict(zip(self._profile.ranks, map(str, paths), strict=True)), largest)
        for path, rank in zip(paths, self._profile.ranks, strict=True):
            if (why := reasons[rank]) is None:
                self._tell(f"step {step} of rank {rank} was recorded: {path}")
            else:
                self._warn(f"step {step} of rank {rank} was recorded, but its trace could not be written: {why}")
