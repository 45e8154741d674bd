"""The responses of a step and of the steps after it: begun as early as ``rollout.max_staleness`` allows.

With 0, generation and training take turns. With 1 the responses of a step are generated while the previous step is
trained, with the weights from before that step::

    0:  generate 1 | train 1 | generate 2 | train 2 | generate 3 | train 3
    1:  generate 1 | train 1              | train 2              | train 3
                   | generate 2 (weights 0) | generate 3 (weights 1)

A step may have several rounds (``algorithm.dynamic_sampling``), all but the first with the newest weights. The next
step's responses are begun after the last round, so that prompts are drawn in the order of the steps. Only with
``continue_over_updates`` some later steps are begun before that.

New weights are loaded between two steps, when all responses that were begun with older weights are finished. With
``rollout.continue_over_updates`` they are loaded at once, and responses in progress continue with them.

At a periodic checkpoint no response is in progress. The next step begins with new responses, both in the run that goes
on and in a run that is resumed there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anytron.base.seeds import derive_seed
from anytron.run.preflight.capabilities import saves_checkpoints

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anytron.config.schema import RunConfig
    from anytron.run.preflight.prepare import PreparedRun
    from anytron.run.rollout.pool import RolloutPool
    from anytron.run.rollout.replica import GiveWeights
    from anytron.run.rollout.turns import Turns
    from anytron.task.data.mixture import Mixture, Place
    from anytron.task.data.prompts import TokenizedPrompt
    from anytron.workers.engines.rollout_engine import Response


@dataclass(frozen=True)
class Prefetched:
    """A step, or a later round of a step (``algorithm.dynamic_sampling``), whose responses are being generated.

    Attributes:
        places: Places of the sampler before the prompts were drawn.
        prompts: The prompts of the step or round.
        responses: Handle of the generation that was started for these prompts.
    """

    places: tuple[Place, ...]
    prompts: list[TokenizedPrompt]
    responses: Any


class RolloutPrefetch:
    """Draws prompts and starts the generation of their responses, for steps ahead as well.

    Args:
        config: The run's configuration.
        prepared: Source of the prompts.
        pool: The rollout engines.
        turns: Maker of the responses, which uses the pool.

    Attributes:
        age: Metrics of the age, in optimizer updates, of the weights that generated the last step's tokens; empty if
            all are new (``rollout.max_staleness=0``).
    """

    def __init__(self, config: RunConfig, prepared: PreparedRun, pool: RolloutPool, turns: Turns) -> None:
        self._config, self._prepared, self._pool, self._turns = config, prepared, pool, turns
        self._begun: deque[Prefetched] = deque()
        self._taken: list[list[Response]] = []
        self._version = 0
        self.age: Mapping[str, float] = {}

    @property
    def sampler(self) -> Mixture:
        """The source of prompts. Its place must be set before the first prompts are drawn."""
        return self._prepared.sampler

    @property
    def places(self) -> tuple[Place, ...]:
        """The place in each source of prompts at which the next step begins.

        Prompts that were drawn ahead for later steps do not count: a resumed run draws them again.
        """
        return self._begun[0].places if self._begun else self.sampler.places

    def finish_in_flight(self) -> None:
        """Finish all responses in flight, unless ``rollout.continue_over_updates`` lets them use the next weights."""
        if not self._config.rollout.continue_over_updates:
            self._turns.finish_in_flight()

    def load_weights(self, give: GiveWeights) -> int:
        """Send the weights of the next step to the replicas; return their version."""
        self._version = self._pool.load_weights(give)
        return self._version

    def take(self, step: int, number: int, count: int) -> tuple[list[TokenizedPrompt], list[list[Response]]]:
        """Return the responses of a round of a step. The first round is begun earlier if possible.

        Args:
            step: Counted from 1.
            number: The round, counted from 1.
            count: Number of prompts; in the first round, all prompts of a step.
        """
        if number == 1:
            self._begin_up_to(self._last_from(step) if self._config.rollout.continue_over_updates else step, step)
            begun, self._taken = self._begun.popleft(), []
        else:
            begun = self._begin(step, number, count)
        responses = self._turns.finish(begun.responses, more=number > 1)
        self._taken += responses
        return begun.prompts, responses

    def move_on(self, step: int) -> dict[str, float]:
        """Begin responses of later steps that may use the current weights, or let replicas sleep.

        Args:
            step: The step, whose responses are all complete.

        Returns:
            Metrics of the memory of sleeping replicas; empty if replicas do not sleep.
        """
        self._begin_up_to(self._last_from(step), step + 1)
        if self._config.rollout.max_staleness:
            self._pool.withdraw_weights()
            self.age = _age(self._taken, self._version)
        self._taken = []
        return self._pool.sleep() if self._config.rollout.sleep else {}

    def _begin_up_to(self, last: int, first: int) -> None:
        """Begin the steps from ``first`` to ``last`` that have not begun; ``_begun`` starts with step ``first``."""
        for step in range(first + len(self._begun), last + 1):
            self._begun.append(self._begin(step, 1, self._config.data.prompts_per_step))

    def _begin(self, step: int, number: int, count: int) -> Prefetched:
        places = self.sampler.places
        prompts = self._prepared.draw(count)
        name = "rollout" if number == 1 else f"rollout round {number}"
        seed = derive_seed(self._config.trainer.seed, name, step)
        return Prefetched(places, prompts, self._turns.begin(prompts, self._config.rollout.samples_per_prompt, seed))

    def _last_from(self, step: int) -> int:
        """The last step whose responses may come from the weights that a step begins with."""
        last = min(step + self._config.rollout.max_staleness, self._config.trainer.total_steps)
        every = self._config.checkpoint.every_steps
        if every is None or not saves_checkpoints(self._config):
            return last
        return min(last, -(-step // every) * every)


def _age(responses: Sequence[Sequence[Response]], version: int) -> dict[str, float]:
    every = [one for group in responses for response in group for one in (response, *response.others)]
    made = [run for response in every for run in response.version_runs]
    tokens = sum(count for _, count in made)
    ages = sum((version - older) * count for older, count in made)
    oldest = min((older for older, _ in made), default=version)
    return {"rollout/age_mean": ages / max(1, tokens), "rollout/age_max": float(version - oldest)}
