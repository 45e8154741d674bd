"""Validate the policy on separate prompts, by the rewards of its responses.

A validation runs at the boundary between two steps, when the rollout engines have the weights of the first step and no
response of the second is in progress::

    train N | weights N | validate N | generate N+1 | train N+1 | ...

Validation does not influence training: it has separate prompts, seeds, processes of reward functions and of
environments. Its prompts and seeds are the same each time, so that only the policy differs between two validations.

:class:`ValidationSchedule` decides when to validate, and acts on the result: it keeps a checkpoint, or ends the run.
Supervised fine-tuning has the same schedule, and measures a loss instead
(:class:`anytron.run.trainer.supervised.HeldOutLoss`).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from anytron.base.errors import DataError, within
from anytron.base.seeds import derive_seed
from anytron.record.checkpoint.directory import Best
from anytron.record.validation import set_metrics, standing
from anytron.run.rollout.turns import turns_of
from anytron.run.trainer.experience import make_samples
from anytron.task.environments.pool import start_environments

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from anytron.config.schema import RunConfig
    from anytron.record.sinks.delivery import MetricSinks
    from anytron.record.tracking.progress import Clock, Progress
    from anytron.record.tracking.run_directory import RunDirectory
    from anytron.run.preflight.prepare import ValidationSet
    from anytron.run.rollout.pool import RolloutPool
    from anytron.run.rollout.turns import Turns
    from anytron.run.trainer.checkpointing import Checkpointing
    from anytron.run.trainer.reward_model import RewardModelRanks
    from anytron.serving.endpoint import Endpoint
    from anytron.task.rewards.sample import Sample
    from anytron.task.rewards.scoring import RewardScores


@dataclass(frozen=True)
class Validation:
    """Evaluates the policy on the validation sets.

    Attributes:
        config: The run's configuration.
        sets: The validation sets; empty for a run without validation.
        pool: The rollout engines, which have the weights that are examined.
        turns: Maker of training's responses, which makes none during a validation.
        judge: The reward model; None without one.
        run: The run's directory, which keeps samples.
        endpoint: The server by which agents reach the model; None without agents.
    """

    config: RunConfig
    sets: Sequence[ValidationSet]
    pool: RolloutPool
    turns: Turns
    judge: RewardModelRanks | None
    run: RunDirectory
    endpoint: Endpoint | None = None

    def __call__(self, step: int) -> dict[str, float]:
        """Examine the policy with the weights that the rollout engines have after a step."""
        self.turns.finish_in_flight()
        metrics: dict[str, float] = {}
        examined = []
        for one in self.sets:
            with within(one.section.title):
                samples, rewards = self._examine(one, step)
            metrics |= set_metrics(one.section, samples, rewards)
            examined.append((one.section.name, samples, rewards))
        for name, samples, rewards in examined:
            self.run.write_samples(step, samples, rewards, name)
        return metrics

    def _examine(self, one: ValidationSet, step: int) -> tuple[list[Sample], RewardScores]:
        """Let the policy answer a set's prompts, and score the answers."""
        section, prepared, config = one.section, one.prepared, self.config
        logs = self.run.path / "logs" / f"validation-{section.name}"
        # Started anew each time: what functions and environments remember would make two validations differ.
        with (
            prepared.rewards.start(logs, config.executor.start_timeout_s) as score,
            start_environments(config, logs) as environments,
        ):
            turns = turns_of(config, prepared, self.pool, environments, self.endpoint)
            prepared.sampler.seek([(0, 0)] * len(prepared.sampler.tables))
            samples: list[Sample] = []
            for begin in range(0, len(prepared.sampler), one.at_one_time):
                prompts = prepared.draw(min(one.at_one_time, len(prepared.sampler) - begin))
                seed = derive_seed(config.trainer.seed, f"validation {section.name}", begin)
                begun: Any = turns.begin(prompts, section.samples_per_prompt, seed)  # of its own kind
                made = make_samples(prompts, turns.finish(begun), prepared.tokenizer)
                samples += [_without_inputs(sample) for sample in made]
            try:
                return samples, score.beside(self.judge)(samples)
            except DataError:
                self.run.write_samples(step, samples, None, section.name)
                raise


def _without_inputs(sample: Sample) -> Sample:
    """Return a sample without the fields that only training reads."""
    others = tuple(_without_inputs(other) for other in sample.others)
    return replace(sample, patches=None, routing=None, others=others)


class ValidationSchedule:
    """Validates the policy when that is due, keeps the best checkpoint, and ends a run that no longer improves.

    The results are in ``validation.jsonl``. A resumed run reads them there, and repeats a validation that was not
    finished.

    Args:
        config: The run's configuration.
        measure: Function that is called with the number of completed steps, validates the policy on all sets, and
            returns the metrics.
        run: The run's directory.
        checkpoints: The checkpointing, which keeps the best checkpoint.
        progress: Display of the validations.
        sinks: Metric sinks, which receive the results.
        first: Number of completed steps at which the run begins.

    Attributes:
        early_stop: Why the run should end now; None if it should go on.
    """

    early_stop: str | None = None

    def __init__(
        self,
        config: RunConfig,
        measure: Callable[[int], dict[str, float]],
        run: RunDirectory,
        checkpoints: Checkpointing,
        progress: Progress,
        sinks: MetricSinks,
        first: int,
    ) -> None:
        self._config, self._section, self._measure = config, config.validation, measure
        self._run, self._checkpoints, self._progress, self._sinks = run, checkpoints, progress, sinks
        self._found = {int(metrics["step"]): metrics for metrics in run.validations()}
        self._untrained = None if run.last_metrics() else first

    def due(self, step: int, *, last: bool = False) -> bool:
        """Whether a validation after a step is due and not done yet.

        Args:
            step: Number of completed steps.
            last: Whether it is the last step.
        """
        if self._section is None or step in self._found:
            return False
        if last or (self._section.before_training and step == self._untrained):
            return True
        every = self._section.every_steps
        return every is not None and step % every == 0 and step != self._untrained

    def after(self, step: int, clock: Clock) -> None:
        """Validate the policy if that is due after a step; keep its checkpoint if it is the best so far.

        If ``validation.patience`` is used up, set :attr:`early_stop`. A resumed run calls this for its last completed
        step too.

        Args:
            step: Number of completed steps.
            clock: Clock of the next step.

        Raises:
            DataError: A reward function or an environment fails for every response.
        """
        if self.due(step):
            with clock.measure("validation"):
                self.examine(step)
        elif step in self._found:
            self._keep_best(step)
        if step in self._found:
            self.early_stop = self._why_to_stop(step)

    def examine(self, step: int) -> None:
        """Validate the policy, and keep its checkpoint if it is the best so far.

        Args:
            step: Number of completed steps.

        Raises:
            DataError: A reward function or an environment fails for every response.
        """
        began = time.perf_counter()
        metrics: dict[str, float] = {"step": step, **self._measure(step)}
        metrics["validation/time_s"] = time.perf_counter() - began
        self._run.write_validation(metrics)
        self._sinks.write(metrics, validation=True)
        self._found[step] = metrics
        self._progress.note(f"validation after step {step}: {_summary(metrics)}")
        self._keep_best(step)

    def _keep_best(self, step: int) -> None:
        """Keep the checkpoint of a step if no examined policy was better."""
        assert self._section is not None, "the run validates"
        metric, direction = self._section.criterion(supervised=self._config.supervised)
        value = self._found[step].get(metric, math.nan)
        if math.isnan(value):
            text = f"step {step}: {metric} is not a number, so it counts as no improvement"
            self._progress.warn(text)
            self._run.log(f"warning: {text}")
        elif self._section.keep_best and step > 0:
            self._checkpoints.keep_best(Best(step=step, metric=metric, direction=direction, value=value))

    def _why_to_stop(self, step: int) -> str | None:
        assert self._section is not None, "the run validates"
        section, (metric, direction) = self._section, self._section.criterion(supervised=self._config.supervised)
        values = [(at, metrics[metric]) for at, metrics in self._found.items() if metric in metrics]
        now = standing(values, direction, section.min_delta)
        if section.patience is None or now.waited < section.patience:
            return None
        least = f" by more than {section.min_delta:g}" if section.min_delta else ""
        best = "was never a number" if now.best is None else f"was {now.best:.4g} after step {now.best_step}"
        return (
            f"early stop after step {step}: {metric} {best} and did not improve{least} in {now.waited} "
            f"validation{'s' if now.waited > 1 else ''} since (validation.patience)"
        )


def _summary(metrics: Mapping[str, float]) -> str:
    """The estimates of a validation with their intervals, in a line."""
    said = []
    for name, value in metrics.items():
        if name.rpartition("/")[2].startswith(("mean@", "pass@", "loss")):
            low, high = (metrics.get(f"{name}/{end}") for end in ("low", "high"))
            ends = "" if low is None or high is None else f" ({low:.3f} to {high:.3f})"
            said.append(f"{name.removeprefix('validation/')} {value:.3f}{ends}")
    return ", ".join(said)
