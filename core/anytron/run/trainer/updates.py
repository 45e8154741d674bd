"""Plan a step's optimizer updates: mini-batches of whole groups, each divided over ranks and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from anytron.algorithms.advantages.groups import group_sizes
from anytron.algorithms.aggregation import Aggregation, loss_weights, token_shares
from anytron.algorithms.kl import penalizes_rewards
from anytron.run.trainer.batching import micro_batches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.config.schema import RunConfig
    from anytron.sequences.batch import RaggedBatch
    from anytron.workers.engines.training_engine import Topology


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences of a batch, ready for an engine.

    Attributes:
        sequences: Indices in the batch that they were taken from.
        batch: Their data.
    """

    sequences: tuple[int, ...]
    batch: RaggedBatch


@dataclass(frozen=True)
class UpdatePlan:
    """How a step's samples become optimizer updates.

    Attributes:
        epochs: Passes over the samples.
        count: Mini-batches, hence updates, in each pass.
        aggregation: How the losses of tokens become one.
        max_tokens: Tokens of a micro-batch at most.
        padded: Micro-batches are padded to their longest sequence, and padding counts.
        multiple: The number of micro-batches is a multiple of this.
        replays_scoring: Updates repeat what the pass that computes old log-probs has recorded.
        length_constant: Tokens that sequences' sums are divided by, if that is the aggregation.
        advantages_need_log_probs: Advantages depend on old log-probs.
    """

    epochs: int
    count: int
    aggregation: Aggregation
    max_tokens: int
    padded: bool = False
    multiple: int = 1
    replays_scoring: bool = False
    length_constant: int = 1
    advantages_need_log_probs: bool = False

    @classmethod
    def from_config(cls, config: RunConfig, topology: Topology) -> UpdatePlan:
        """Take the plan from the configuration, and from what the engine says of itself."""
        return cls(
            epochs=config.algorithm.epochs,
            count=config.algorithm.mini_batches,
            aggregation=config.algorithm.aggregation,
            max_tokens=config.engine.max_tokens_per_micro_batch,
            padded=config.engine.sequence_format == "bshd",
            multiple=topology.micro_batch_multiple,
            replays_scoring=topology.replays_scoring,
            length_constant=config.algorithm.length_constant or config.rollout.max_new_tokens,
            advantages_need_log_probs=penalizes_rewards(config.algorithm) or config.teacher is not None,
        )

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether advantages ask for them, or some update sees a changed policy or repeats what scoring recorded."""
        return self.replays_scoring or self.advantages_need_log_probs or self.epochs * self.count > 1

    def mini_batches(self, batch: RaggedBatch, seed: int) -> Iterator[RaggedBatch]:
        """Give the mini-batches of all passes, with the weights of their tokens.

        Groups go into mini-batches in a random order, another one in each pass; a single mini-batch keeps their order.
        One that has nothing to learn from is left out: there are fewer groups than mini-batches, or its responses are
        all empty.
        """
        sequences = torch.arange(batch.num_sequences)
        groups = sequences.split(group_sizes(sequences if batch.groups is None else batch.groups))
        generator = torch.Generator().manual_seed(seed)
        for _ in range(self.epochs):
            order = torch.randperm(len(groups), generator=generator) if self.count > 1 else torch.arange(len(groups))
            for chosen in torch.tensor_split(order, self.count):
                if not chosen.numel():
                    continue
                mini_batch = batch
                if self.count > 1:
                    mini_batch = batch.select(torch.cat([groups[group] for group in chosen.tolist()]))
                if batch.response_mask.any() and not mini_batch.response_mask.any():
                    continue
                mask = mini_batch.response_mask
                weights = loss_weights(mini_batch.lengths, mask, self.aggregation, self.length_constant)
                yield replace(mini_batch, loss_weights=weights, token_shares=token_shares(mask))

    def micro_batches(self, batch: RaggedBatch, dp_size: int) -> list[list[MicroBatch]]:
        """Divide a batch over data-parallel replicas and micro-batches.

        Returns:
            ``[dp_size][micro-batches]``, equally many for each replica. Where there is no sequence left
            for a micro-batch, it is the shortest sequence once more with weights of 0.
        """
        lengths = batch.lengths.tolist()
        per_rank = micro_batches(lengths, self.max_tokens, dp_size, padded=self.padded, multiple=self.multiple)
        return [[_take(batch, part) for part in parts] for parts in per_rank]


def _take(batch: RaggedBatch, sequences: list[int]) -> MicroBatch:
    if len(sequences) == batch.num_sequences:
        return MicroBatch(tuple(sequences), batch)
    if sequences:
        return MicroBatch(tuple(sequences), batch.select(torch.tensor(sequences)))
    shortest = int(batch.lengths.argmin())
    filler = batch.select(torch.tensor([shortest]))
    nothing = torch.zeros(filler.num_tokens)
    return MicroBatch((shortest,), replace(filler, loss_weights=nothing, token_shares=nothing, is_filler=True))
