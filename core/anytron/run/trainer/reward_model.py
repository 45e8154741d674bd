"""The ranks of a reward model as the loop sees them: samples in, scores out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from anytron.run.trainer.experience import assemble
from anytron.run.trainer.updates import UpdatePlan, shared
from anytron.workers.engines.training_engine import RewardModelEngine
from anytron.workers.executor.protocol import call, submit_each

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from anytron.config.schema import RunConfig
    from anytron.run.rollout.turns import Turns
    from anytron.run.trainer.updates import MicroBatch
    from anytron.sequences.batch import RaggedBatch
    from anytron.task.rewards.sample import Sample
    from anytron.workers.engines.training_engine import Topology
    from anytron.workers.executor.protocol import Pending, WorkerGroup


@dataclass(frozen=True)
class RewardModelRanks:
    """All ranks of the reward model: an :class:`anytron.task.rewards.scoring.RewardModel`.

    Attributes:
        group: The worker processes.
        topology: Position of each rank in the parallel layout, in rank order.
        plan: Divides samples into micro-batches.
        turns: Maker of responses, which goes on while the driver waits for the ranks; None = no generation meanwhile.
    """

    group: WorkerGroup
    topology: tuple[Topology, ...]
    plan: UpdatePlan
    turns: Turns | None = None

    @classmethod
    def of(cls, group: WorkerGroup, config: RunConfig) -> RewardModelRanks:
        """Wait until the ranks are ready, and ask for their positions in the parallel layout.

        Args:
            group: The worker processes.
            config: The run's configuration.
        """
        topology = tuple(call(group, RewardModelEngine.topology))
        return cls(group, topology, UpdatePlan.from_config(config.of_reward_model, topology[0]))

    def while_generating(self, turns: Turns) -> RewardModelRanks:
        """Return an object for the same ranks that lets ``turns`` generate while it waits for the ranks."""
        return replace(self, turns=turns)

    def begin(self, samples: Sequence[Sample]) -> Callable[[], list[float]]:
        """Start to score samples, sent as the policy's token ids; the returned function waits for the scores."""
        scores = self._begin(assemble(samples, temperature=1.0))
        return lambda: scores().tolist()

    def scores(self, batch: RaggedBatch) -> Tensor:
        """Score sequences: float32 ``[B]``."""
        return self._begin(batch)()

    def describe(self) -> list[Mapping[str, Any]]:
        """Return facts about each rank, for the run's records."""
        return call(self.group, RewardModelEngine.describe)

    def _begin(self, batch: RaggedBatch) -> Callable[[], Tensor]:
        dp_size = self.topology[0].dp_size
        per_rank = self.plan.micro_batches(batch.for_scoring(), dp_size)
        shares = ((ranks, (batches,)) for ranks, batches in shared(per_rank, self.topology))
        pending = submit_each(self.group, RewardModelEngine.score, shares)
        return partial(self._collect, pending, per_rank, batch.num_sequences)

    def _collect(
        self, pending: Pending[list[Tensor] | None], per_rank: list[list[MicroBatch]], sequences: int
    ) -> Tensor:
        """Wait for the scores of the reporting ranks; return them in the order of the batch's sequences."""
        if self.turns is not None:
            self.turns.attend(pending)
        scores = torch.full((sequences,), torch.nan)
        for place, found in zip(self.topology, pending.result(), strict=True):
            if found is not None and place.reports:
                for micro_batch, part in zip(per_rank[place.dp_rank], found, strict=True):
                    if not micro_batch.is_filler:
                        scores[list(micro_batch.sequences)] = part
        return scores
