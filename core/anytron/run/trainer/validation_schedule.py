"""When a policy is examined, and what follows from it: a checkpoint that is kept, or the end of the run.

What was found lies in ``validation.jsonl``: a run that is resumed reads it there, and repeats a validation that was not
finished.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from anytron.record.checkpoint.best import Best
from anytron.record.validation.standing import standing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from anytron.config.schema import RunConfig
    from anytron.record.sinks.delivery import MetricSinks
    from anytron.record.tracking.progress import Clock, Progress
    from anytron.record.tracking.run_directory import RunDirectory
    from anytron.run.trainer.checkpointing import Checkpointing


class ValidationSchedule:
    """Has the policy examined when it is time to.

    Args:
        config: The run.
        measure: Examines the policy on all sets, as it is after so many steps, and returns the metrics.
        run: The run's directory.
        checkpoints: Keep what is best.
        progress: Is told of every validation.
        sinks: Are given its numbers.
        first: Steps behind the policy with which the run begins.

    Attributes:
        early_stop: Why the run should end now; None if it should not.
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
        """Whether the policy after a step is to be examined, and has not been.

        Args:
            step: Steps behind it.
            last: No step will follow.
        """
        if self._section is None or step in self._found:
            return False
        if last or (self._section.before_training and step == self._untrained):
            return True
        every = self._section.every_steps
        return every is not None and step % every == 0 and step != self._untrained

    def after(self, step: int, clock: Clock) -> None:
        """Examine the policy if it is time to, and draw conclusions, also from a validation before a resume.

        Args:
            step: Steps behind the policy.
            clock: That of the next step.
        """
        if self.due(step):
            with clock.measure("validation"):
                self.examine(step)
        elif step in self._found:
            self._keep_best(step)
        if step in self._found:
            self.early_stop = self._why_to_stop(step)

    def examine(self, step: int) -> None:
        """Examine the policy, and keep it if it is the best so far.

        Args:
            step: Steps behind it.

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
            text = f"step {step}: {metric} is not a number, and counts as no better than those before"
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
            f"early stop after step {step}: {metric} {best} and did not become better{least} in {now.waited} "
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
