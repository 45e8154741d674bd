"""Warn when a run seems to learn nothing, or the wrong thing, although nothing fails; and count skipped steps.

The checks read the difference of rollout and training log-probs, the norm of each model's gradient, the number of
groups with signal (different rewards), and whether the mean reward rises. Non-finite updates are handled in
:mod:`anytron.run.trainer.non_finite`.
"""

from __future__ import annotations

import shlex
from collections import deque
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from typing_extensions import Self

from anytron.base.errors import DataError
from anytron.run.trainer.metrics import AGREEMENT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anytron.config.schema import RunConfig
    from anytron.record.tracking.progress import Progress
    from anytron.record.tracking.run_directory import RunDirectory
    from anytron.run.trainer.experience import Experience
    from anytron.run.trainer.updates import MiniBatch
    from anytron.sequences.batch import RaggedBatch

IN_A_ROW = "reward/steps_without_signal"
"""Name of the metric that counts the steps in a row, up to this one, without a token to train on."""
DISAGREEMENT = 0.1
"""Mean difference of rollout and training log-probs, in nats, above which to warn: rounding in bfloat16 is far less."""
WITHOUT_SIGNAL = "reward/groups_without_signal"
WINDOW, NEARLY_ALL, RISE = 20, 0.9, 0.1
"""The reward has risen if its mean over the last ``WINDOW`` steps is more than a tenth (``RISE``) above its mean over
the first ``WINDOW`` steps. If it has not, and the share ``NEARLY_ALL`` of the groups has no signal, the policy learns
almost nothing. If it has, groups without signal may come from prompts that are learnt."""
STEPS_BETWEEN = 100
"""Smallest number of steps after which a warning is repeated."""
_ROUNDING = 1e-4
"""Largest relative rounding error of metrics that are sums over many tokens."""


class Alarms:
    """Checks the metrics of a run. A context manager: leaving warns how many steps had suspicious metrics.

    Args:
        config: The run's configuration.
        run: The run directory, whose log has every warning.
        progress: Display of the warnings: each kind when it first occurs, and again after ``STEPS_BETWEEN`` steps.
    """

    def __init__(self, config: RunConfig, run: RunDirectory, progress: Progress) -> None:
        self._config, self._run, self._progress = config, run, progress
        self._examine = f"To find the cause: anytron verify {shlex.quote(str(run.path / 'config.yaml'))}"
        self._found: dict[str, tuple[str, str]] = {}  # what is to be said, and what to do
        self._sightings: dict[str, _Sightings] = {}
        self._steps = 0
        self._first: list[float] = []  # mean rewards
        self._recent: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # mean rewards, shares of groups without signal

    def updated(self, mini_batch: MiniBatch, metrics: Mapping[str, float]) -> None:
        """Check an update for a gradient of exactly 0 although there was something to learn.

        Args:
            mini_batch: The mini-batch of the update.
            metrics: Metrics of the update, of critic and policy or of one of them.
        """
        if metrics.get("critic/grad_norm") == 0.0 and critic_has_to_learn(metrics):
            self._find(
                "critic/grad_norm was 0",
                "critic/grad_norm is 0, although values differ from returns: the critic learns nothing; "
                "some kernel or hook returns no gradient",
            )
        if metrics.get("grad_norm") == 0.0 and policy_has_to_learn(mini_batch.batch, metrics, self._config):
            self._find(
                "grad_norm was 0",
                "grad_norm is 0, although there are tokens to learn from: the policy learns nothing; "
                "some kernel or hook returns no gradient",
            )

    def stepped(self, metrics: Mapping[str, float]) -> None:
        """Check a finished step, and print its warnings.

        With ``rollout.max_staleness``, log-probs of rollout and training are compared only in steps whose tokens all
        come from the newest weights, because the policy has changed since older weights. Every run has such a step: its
        first.
        """
        step, difference = int(metrics["step"]), metrics.get(AGREEMENT, 0.0)
        fresh = metrics.get("rollout/age_max", 0.0) == 0.0
        if fresh and difference > DISAGREEMENT and self._config.trainer.rollout_log_prob_tolerance is None:
            self._find(
                f"{AGREEMENT} was above {DISAGREEMENT}",
                f"{AGREEMENT} is {difference:.3g}: above {DISAGREEMENT} generation and training disagree about the "
                "model, and the policy learns from responses that are not its own",
                f"{self._unmeasured()}{self._examine}",
            )
        missing = int(metrics.get("sampling/groups_missing", 0))
        if in_a_row := int(metrics.get(IN_A_ROW, 0)):
            limit = self._config.algorithm.max_steps_without_signal
            self._find(
                f"{IN_A_ROW} was above 0",
                f"there is nothing to train on, and the step is skipped: {in_a_row} in a row so far, and the run ends "
                f"after {limit} (algorithm.max_steps_without_signal)",
                "Look at the rewards and the lengths of responses in samples.jsonl",
            )
        elif missing:
            self._find(
                "sampling/groups_missing was above 0",
                f"sampling/groups_missing is {missing}: the step has fewer groups than data.prompts_per_step, as "
                f"{metrics['sampling/no_signal_fraction']:.0%} of the groups drawn in "
                f"{metrics['sampling/rounds']:.0f} rounds have no signal",
                "Use prompts that the policy solves sometimes, or raise algorithm.dynamic_sampling_rounds",
            )
        self._look_for_a_rise(metrics)
        self._steps += 1
        found, self._found = self._found, {}
        for kind, (text, advice) in found.items():
            seen = self._sightings.setdefault(kind, _Sightings(advice))
            seen.steps += 1
            if seen.told and step < seen.told_at + STEPS_BETWEEN:
                continue
            counted = f" ({seen.steps} steps so far)" if seen.told else ""
            self._warn(f"step {step}: {text}{counted}. {advice}")
            seen.told, seen.told_at = seen.steps, step

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for kind, seen in self._sightings.items():
            if seen.steps > seen.told:
                self._warn(f"{kind} in {seen.steps} of {self._steps} steps. {seen.advice}")

    def _look_for_a_rise(self, metrics: Mapping[str, float]) -> None:
        """Warn if nearly all recent groups had no signal and the mean reward has not risen since the first steps.

        The first steps are counted from the start or the resume of the run. There is no such warning with dynamic
        sampling, which does not train on groups without signal: :meth:`stepped` warns if too few groups have a signal.
        """
        if WITHOUT_SIGNAL not in metrics or self._config.algorithm.dynamic_sampling:
            return
        reward = metrics["reward/mean"]
        if len(self._first) < WINDOW:
            self._first.append(reward)
            return
        self._recent.append((reward, metrics[WITHOUT_SIGNAL] / self._config.data.prompts_per_step))
        if len(self._recent) < WINDOW:
            return
        first, (recent, share) = fmean(self._first), map(fmean, zip(*self._recent, strict=True))
        if share >= NEARLY_ALL and recent - first <= RISE * abs(first):
            self._find(
                "nearly all groups had no signal, and reward/mean did not rise,",
                f"in the last {WINDOW} steps {share:.0%} of the groups had no signal ({WITHOUT_SIGNAL}), and the mean "
                f"reward has not risen: {first:.3g} in the first {WINDOW} steps, {recent:.3g} now. The policy learns "
                "almost nothing",
                "Look at samples.jsonl. If rewards are low, use prompts that the policy solves sometimes, reward parts "
                "of an answer, or raise rollout.samples_per_prompt; if they are high, the task is learnt",
            )

    def _find(self, kind: str, text: str, advice: str | None = None) -> None:
        """Note a warning of a kind with its advice; None = the advice to run ``anytron verify``."""
        self._found[kind] = (text, advice or self._examine)

    def _unmeasured(self) -> str:
        """Say how to get further metrics of a disagreement; empty if the run has them already."""
        if self._config.corrected_algorithm.importance_correction not in ("auto", "none"):
            return ""
        return (
            "algorithm.importance_correction=measured adds the largest difference, the KL divergence, the correlation "
            "and the effective sample size to the metrics, and corrects nothing. "
        )

    def _warn(self, text: str) -> None:
        self._progress.warn(text)
        self._run.log(f"warning: {text}")


@dataclass
class _Sightings:
    """How often one kind of warning was found.

    Attributes:
        advice: Advice to the user.
        steps: Number of steps in which it was found.
        told: Number of these steps at the last printed warning; 0 = none was printed.
        told_at: Step of the last printed warning.
    """

    advice: str
    steps: int = 0
    told: int = 0
    told_at: int = 0


def policy_has_to_learn(batch: RaggedBatch, metrics: Mapping[str, float], config: RunConfig) -> bool:
    """Return whether the policy's loss should have a gradient, judging by its parts.

    The advantages give no gradient if all are 0 (the rewards of each group are equal), or if each token with an
    advantage has a clipped ratio or a masked importance factor. An entropy bonus or a KL penalty adds a gradient, but
    the penalty has none as long as the policy equals the reference. In supervised fine-tuning, which has no advantages,
    every token of a response has a gradient.
    """
    if batch.advantages is None:
        return True
    assert batch.token_shares is not None, "mini-batches have them"
    advantaged = float(batch.token_shares[batch.advantages != 0].sum())
    clipped = metrics.get("policy/clip_fraction", 0.0)
    if config.algorithm.importance_correction == "masked":
        clipped += metrics.get("rollout/importance_clip_fraction", 0.0)
    entropic = config.algorithm.entropy_coefficient != 0.0 and metrics.get("policy/entropy", 0.0) != 0.0
    return advantaged > clipped * (1.0 + _ROUNDING) or entropic or metrics.get("loss/kl", 0.0) != 0.0


def critic_has_to_learn(metrics: Mapping[str, float]) -> bool:
    """Return whether the critic's loss has a gradient: some value differs from its return and is not clipped."""
    return metrics["critic/loss"] != 0.0 and metrics["critic/clip_fraction"] < 1.0 - _ROUNDING


class SkippedSteps:
    """Counts steps without a token to train on: each is skipped, and too many in a row end the run.

    Args:
        config: The run's configuration.
        metrics: Metrics of the last step before a resume, from which counting continues; empty in a new run.
    """

    def __init__(self, config: RunConfig, metrics: Mapping[str, float]) -> None:
        self._config, self._in_a_row = config, int(metrics.get(IN_A_ROW, 0))

    def look(self, step: int, experience: Experience) -> dict[str, float]:
        """Count the step if no token of it is trained on; return the number of such steps in a row, as a metric.

        Args:
            step: Counted from 1.
            experience: Experience of the step.

        Raises:
            DataError: ``algorithm.max_steps_without_signal`` steps in a row had no token to train on.
        """
        self._in_a_row = 0 if experience.teaches else self._in_a_row + 1
        limit = self._config.algorithm.max_steps_without_signal
        if self._in_a_row >= limit:
            raise DataError(
                "There is nothing to train on." if limit == 1 else f"{limit} steps in a row had nothing to train on.",
                where=f"step {step}",
                why=f"algorithm.max_steps_without_signal is {limit}; {_why(experience, self._config)}",
                fix=f"{_remedies(experience, self._config)}, and continue with resume=auto; or allow more such steps: "
                f"set algorithm.max_steps_without_signal={10 * limit}",
            )
        return {IN_A_ROW: self._in_a_row}

    def outcome(self, *, policy: bool, critic: bool) -> dict[str, float]:
        """Return the metrics of a skipped step: the numbers of skipped updates.

        Args:
            policy: Whether the step would have updated the policy.
            critic: Whether the step would have updated the critic.
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
    why = f"of {len(step.samples)} responses in the last step {said or 'none failed'}"
    if algorithm.dynamic_sampling and len(rewards):
        why += f"; within each group, rewards are equal (over all groups, {rewards.min():g} to {rewards.max():g})"
    return why


def _remedies(step: Experience, config: RunConfig) -> str:
    """Return advice: what a user may change before the run continues from its last checkpoint."""
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
