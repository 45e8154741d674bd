"""Examine the policy on prompts of its own, by the rewards of its responses.

It happens at the boundary between two steps, when the rollout engines have the weights of the first one and nothing of
the second is under way::

    train N | weights N | examine N | generate N+1 | train N+1 | ...

Training goes on as if there were no validation: prompts, seeds, processes of reward functions and of environments are
validation's own. Its prompts and seeds are the same each time, so that what differs between two validations is the
policy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from anytron.base.errors import DataError, within
from anytron.base.seeds import derive_seed
from anytron.record.validation.metrics import set_metrics
from anytron.run.rollout.conversations import turns_of
from anytron.run.trainer.experience import make_samples
from anytron.task.environments.loading import start_environments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.config.schema import RunConfig
    from anytron.record.tracking.run_directory import RunDirectory
    from anytron.run.preflight.prepare import ValidationSet
    from anytron.run.rollout.conversations import Conversations, SingleTurns
    from anytron.run.rollout.pool import RolloutPool
    from anytron.run.trainer.reward_model import RewardModelRanks
    from anytron.task.rewards.sample import Sample
    from anytron.task.rewards.scoring import RewardScores


@dataclass(frozen=True)
class Validation:
    """Has the policy answer prompts.

    Attributes:
        config: The run.
        sets: On what; empty for a run without validation.
        pool: The rollout engines, which have the weights that are examined.
        turns: Training's responses, none of which is under way during a validation.
        judge: The reward model; None without one.
        run: The run's directory, which keeps samples.
    """

    config: RunConfig
    sets: Sequence[ValidationSet]
    pool: RolloutPool
    turns: SingleTurns | Conversations
    judge: RewardModelRanks | None
    run: RunDirectory

    def __call__(self, step: int) -> dict[str, float]:
        """Examine the policy with the weights that the rollout engines have, those of after a step."""
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
            turns = turns_of(config, prepared, self.pool, environments)
            prepared.sampler.seek([(0, 0)] * len(prepared.sampler.tables))
            samples: list[Sample] = []
            for begin in range(0, len(prepared.sampler), one.at_one_time):
                prompts = prepared.draw(min(one.at_one_time, len(prepared.sampler) - begin))
                seed = derive_seed(config.trainer.seed, f"validation {section.name}", begin)
                begun: Any = turns.begin(prompts, section.samples_per_prompt, seed)  # of its own kind
                made = make_samples(prompts, turns.finish(begun), prepared.tokenizer)
                samples += [replace(sample, patches=None, routing=None) for sample in made]  # only training reads them
            try:
                return samples, score.beside(self.judge)(samples)
            except DataError:
                self.run.write_samples(step, samples, None, section.name)
                raise
