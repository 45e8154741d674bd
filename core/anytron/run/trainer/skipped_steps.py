"""Steps without a token to train on: each is skipped and counted, and too many in a row end the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.base.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anytron.config.schema import RunConfig
    from anytron.run.trainer.experience import Experience

IN_A_ROW = "reward/steps_without_signal"
"""Steps in a row, up to this one, that had no token to train on."""


class SkippedSteps:
    """Counts steps without signal.

    Args:
        config: The run.
        metrics: Those of the step before the first one, from which a resumed run goes on counting; empty without one.
    """

    def __init__(self, config: RunConfig, metrics: Mapping[str, float]) -> None:
        self._config, self._in_a_row = config, int(metrics.get(IN_A_ROW, 0))

    def look(self, step: int, experience: Experience) -> dict[str, float]:
        """Count a step, as a metric.

        Args:
            step: Counted from 1.
            experience: The step's.

        Raises:
            DataError: It has no token to train on, and neither had those before it, as many as there may be.
        """
        self._in_a_row = 0 if experience.teaches else self._in_a_row + 1
        limit = self._config.algorithm.max_steps_without_signal
        if self._in_a_row >= limit:
            raise DataError(
                "There is nothing to train on." if limit == 1 else f"{limit} steps in a row had nothing to train on.",
                where=f"step {step}",
                why=f"algorithm.max_steps_without_signal is {limit}; {_why(experience, self._config)}",
                fix=f"{_remedies(experience, self._config)}, and continue with resume=auto; or skip more such steps: "
                f"algorithm.max_steps_without_signal={10 * limit}",
            )
        return {IN_A_ROW: self._in_a_row}

    def outcome(self, *, policy: bool, critic: bool) -> dict[str, float]:
        """Give what the updates of a skipped step report: that all of them were left out.

        Args:
            policy: The policy would have been updated.
            critic: The critic would have been.
        """
        left_out = float(self._config.algorithm.epochs * self._config.algorithm.mini_batches)
        models = {"update/skipped": policy, "critic/update/skipped": critic}
        return {name: left_out for name, updated in models.items() if updated}


def _why(step: Experience, config: RunConfig) -> str:
    """Say why no sample of a step is trained on."""
    algorithm, rewards = config.algorithm, step.rewards.total[~step.rewards.total.isnan()]
    parts = {
        "had a reward or an environment that failed": len(step.samples) - len(rewards),
        "were truncated and masked": _truncated(step) if algorithm.overlong_masking else 0,
        "were empty": sum(not sample.own_tokens for sample in step.samples),
    }
    said = ", ".join(f"{count} {what}" for what, count in parts.items() if count)
    why = f"of {len(step.samples)} responses in the last one {said or 'none failed'}"
    if algorithm.dynamic_sampling and len(rewards):
        why += f"; within each group the others have the same reward, {rewards.min():g} to {rewards.max():g}"
    return why


def _remedies(step: Experience, config: RunConfig) -> str:
    """Say what a run that goes on from its last checkpoint may change."""
    algorithm = config.algorithm
    remedies: list[str] = []
    if algorithm.overlong_masking and _truncated(step):
        remedies += ["raise rollout.max_new_tokens", "set algorithm.overlong_masking=false"]
    if algorithm.dynamic_sampling:
        remedies += [
            "raise rollout.samples_per_prompt or algorithm.dynamic_sampling_rounds",
            "set algorithm.dynamic_sampling=false",
        ]
    if not all(sample.own_tokens for sample in step.samples):
        remedies.append("check rollout.stop and the model's end token, or set rollout.min_new_tokens=1")
    learnt = "if these are the highest rewards, the task is learnt; otherwise " if algorithm.dynamic_sampling else ""
    return learnt + (", or ".join(remedies) or "correct the functions that fail (samples.jsonl has the step's samples)")


def _truncated(step: Experience) -> int:
    return sum(not sample.finished for sample in step.samples)
