"""Plan a step's optimizer updates: mini-batches of whole groups, each divided over ranks and micro-batches.

Micro-batches have balanced token counts, and every data-parallel rank has equally many. Planning n sequences and m
micro-batches takes O((n + m) log(n + m)) time. It is done for every pass, with all sequences of a step.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch
from torch import Tensor

from anytron.algorithms.advantages import broadcast_to_tokens, group_sizes
from anytron.algorithms.aggregation import Aggregation, loss_weights, token_share
from anytron.algorithms.kl import penalizes_rewards
from anytron.sequences.batch import RaggedBatch, as_filler, micro_batches_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from anytron.config.schema import RunConfig
    from anytron.workers.engines.training_engine import Topology
    from anytron.workers.executor.protocol import Share


@dataclass(frozen=True)
class MiniBatch:
    """The sequences of one optimizer update, which are copied from the step's batch when they are sent.

    Attributes:
        whole: The step's batch.
        sequences: int64 ``[B]``, indices of the sequences in the step's batch.
        weights: float32 ``[B]``, for each sequence the weight in the loss of each token of its response.
        share: float32 scalar, the weight of each response token in the averages of metrics.
    """

    whole: RaggedBatch
    sequences: Tensor
    weights: Tensor
    share: Tensor

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, int64 ``[B]``."""
        return self.whole.lengths[self.sequences]

    @property
    def num_sequences(self) -> int:
        """Number of sequences, B."""
        return self.sequences.numel()

    @property
    def batch(self) -> RaggedBatch:
        """The data of all sequences, copied at each access."""
        return self.select(torch.arange(self.num_sequences))

    def select(self, sequences: Tensor) -> RaggedBatch:
        """Copy some sequences, in the given order, with the weights of their tokens.

        Args:
            sequences: int64 ``[K]`` indices.
        """
        batch = self.whole.select(self.sequences[sequences])
        weights = broadcast_to_tokens(self.weights[sequences], batch.lengths, batch.response_mask)
        return replace(batch, loss_weights=weights, token_shares=batch.response_mask * self.share)


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences of a batch, which are copied from it when they are sent.

    Attributes:
        sequences: Indices of the sequences in the whole batch.
        whole: The whole batch.
        is_filler: Whether it is a copy of a sequence that another micro-batch has (:attr:`RaggedBatch.is_filler`).
    """

    sequences: tuple[int, ...]
    whole: RaggedBatch | MiniBatch
    is_filler: bool = False

    @property
    def batch(self) -> RaggedBatch:
        """The data of the sequences, copied at each access; a filler has weights of 0."""
        batch = self.whole.select(torch.tensor(self.sequences))
        return as_filler(batch) if self.is_filler else batch


class ReplicaBatches(Sequence[RaggedBatch]):
    """The data of a data-parallel replica's micro-batches, copied when they are read.

    All are sent to a rank together, as one batch: this takes half the time of sending each micro-batch's arrays.

    Args:
        micro_batches: One or more micro-batches of the same batch.
    """

    def __init__(self, micro_batches: Sequence[MicroBatch]) -> None:
        self._micro_batches = micro_batches

    def __len__(self) -> int:
        return len(self._micro_batches)

    @overload
    def __getitem__(self, place: int) -> RaggedBatch: ...
    @overload
    def __getitem__(self, place: slice) -> ReplicaBatches: ...
    def __getitem__(self, place: int | slice) -> RaggedBatch | ReplicaBatches:
        if isinstance(place, slice):
            return ReplicaBatches(self._micro_batches[place])
        return self._micro_batches[place].batch

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle all sequences as one batch; unpickled, the micro-batches are a list."""
        sequences = [sequence for one in self._micro_batches for sequence in one.sequences]
        joined = self._micro_batches[0].whole.select(torch.tensor(sequences))
        counts = [len(one.sequences) for one in self._micro_batches]
        return micro_batches_of, (joined, counts, [one.is_filler for one in self._micro_batches])


@dataclass(frozen=True)
class UpdatePlan:
    """How a step's samples become optimizer updates.

    Attributes:
        epochs: Number of passes over the samples.
        count: Number of mini-batches, hence of updates, in each pass.
        aggregation: How the losses of tokens are combined.
        max_tokens: Largest number of tokens of a micro-batch.
        padded: Whether micro-batches are padded to their longest sequence, so that ``max_tokens`` includes padding.
        multiple: The number of micro-batches of each replica is a multiple of this.
        replays_scoring: Whether updates repeat the routing that was recorded when old log-probs were computed.
        length_constant: Divisor of each sequence's summed loss, in tokens, with ``aggregation=length-constant``.
        advantages_need_log_probs: Whether advantages depend on old log-probs.
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
        """Make the plan from the configuration and the properties of the engine."""
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
        """Whether old log-probs must be computed: for advantages, for several updates, or to record routing."""
        return self.replays_scoring or self.advantages_need_log_probs or self.epochs * self.count > 1

    def mini_batches(self, batch: RaggedBatch, seed: int) -> Iterator[MiniBatch]:
        """Return the mini-batches of all passes, with the weights of their tokens.

        Groups are distributed over mini-batches in a random order, different in each pass; a single mini-batch keeps
        their order. Mini-batches with nothing to learn from are left out: they have no group, because there are fewer
        groups than mini-batches, or only empty responses.

        Raises:
            DataError: Every response of the batch is empty.
        """
        every = torch.arange(batch.num_sequences)
        groups = every.split(group_sizes(every if batch.groups is None else batch.groups))
        generator = torch.Generator().manual_seed(seed)
        for _ in range(self.epochs):
            order = torch.randperm(len(groups), generator=generator) if self.count > 1 else torch.arange(len(groups))
            for chosen in torch.tensor_split(order, self.count):
                if not chosen.numel():
                    continue
                sequences = torch.cat([groups[group] for group in chosen.tolist()])
                counts = batch.response_counts[sequences]
                if batch.response_counts.any() and not counts.any():
                    continue
                responses = None if batch.responses is None else batch.responses[sequences]
                weights = loss_weights(counts, self.aggregation, self.length_constant, responses)
                yield MiniBatch(batch, sequences, weights, token_share(counts))

    def micro_batches(self, batch: RaggedBatch | MiniBatch, dp_size: int) -> list[list[MicroBatch]]:
        """Divide a batch over data-parallel replicas and micro-batches.

        Returns:
            ``[dp_size][micro-batches]``, equally many for each replica. If no sequence is left for a micro-batch, it
            holds a second copy of the shortest sequence, with weights of 0.
        """
        lengths = batch.lengths.tolist()
        per_rank = micro_batches(lengths, self.max_tokens, dp_size, padded=self.padded, multiple=self.multiple)
        filler = MicroBatch((lengths.index(min(lengths)),), batch, is_filler=True)
        return [[MicroBatch(tuple(part), batch) if part else filler for part in parts] for parts in per_rank]


def shared(per_rank: Sequence[Sequence[MicroBatch]], topology: Sequence[Topology]) -> Iterator[Share[ReplicaBatches]]:
    """Yield the ranks of each replica with its micro-batches, which are copied from the whole batch when they are sent.

    Args:
        per_rank: ``[dp_size][micro-batches]``.
        topology: Position of each rank, in rank order.
    """
    ranks: list[list[int]] = [[] for _ in per_rank]
    for rank, place in enumerate(topology):
        ranks[place.dp_rank].append(rank)
    for members, micro_batches in zip(ranks, per_rank, strict=True):
        yield members, ReplicaBatches(micro_batches)


Partition = list[list[int]]
"""Indices of sequences, part by part."""


def micro_batches(
    lengths: Sequence[int], max_tokens: int, dp_size: int, *, padded: bool = False, multiple: int = 1
) -> list[Partition]:
    """Plan one pass over some sequences.

    Args:
        lengths: Tokens of each sequence, each at least 1; at least one sequence.
        max_tokens: Largest number of tokens of a micro-batch; a longer sequence gets its own micro-batch.
        dp_size: Number of data-parallel replicas.
        padded: Whether each micro-batch is padded to its longest sequence, so that padding counts as tokens.
        multiple: The number of micro-batches of a replica is a multiple of this.

    Returns:
        ``[dp_size][micro-batches]`` lists of indices: every index once, every replica equally many micro-batches. If
        not padded, their number over all replicas is at most that of best-fit-decreasing packing, rounded up to a
        multiple of ``dp_size * multiple``; such packing needs at most 11/9 of the smallest possible number plus 4 (D.
        S. Johnson et al., "Worst-case performance bounds for simple one-dimensional packing algorithms", 1974). If
        there are fewer sequences than micro-batches, some are empty: the caller must fill them with a sequence of
        weight 0, because ranks wait for each other in every micro-batch.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])  # ties stay in order

    def count(needed: int) -> int:
        return -(-needed // (dp_size * multiple)) * dp_size * multiple

    if padded:
        parts = _even_rows(order, lengths, max_tokens, count)
    else:
        # A sequence over the limit fills one micro-batch, however long it is.
        fewest = count(-(-sum(min(length, max_tokens) for length in lengths) // max_tokens))
        found = _level(order, lengths, max_tokens, fewest)
        if found is None:
            packed = _packed(order, lengths, max_tokens)
            needed = count(len(packed))
            found = _level(order, lengths, max_tokens, needed) or _halved(packed, lengths, needed)
        parts = _evened(found, lengths, max_tokens)
    parts += [[] for _ in range(count(len(parts)) - len(parts))]
    return _dealt(parts, [_tokens(part, lengths, padded) for part in parts], dp_size)


def _tokens(part: Sequence[int], lengths: Sequence[int], padded: bool) -> int:
    sizes = [lengths[index] for index in part]
    return len(sizes) * max(sizes, default=0) if padded else sum(sizes)


def _level(order: Sequence[int], lengths: Sequence[int], max_tokens: int, count: int) -> Partition | None:
    """Assign each sequence, longest first, to the part with the fewest tokens; None if one does not fit there."""
    parts: Partition = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for index in order:
        load, number = loads[0]
        if parts[number] and load + lengths[index] > max_tokens:
            return None
        parts[number].append(index)
        heapq.heapreplace(loads, (load + lengths[index], number))
    return parts


def _packed(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> Partition:
    """Put each sequence, longest first, where it leaves the least room; into a new part if it fits nowhere."""
    parts: Partition = []
    rooms: list[tuple[int, int]] = []  # tokens that a part may still get, ascending, and the part's number
    for index in order:
        at = bisect_left(rooms, (lengths[index], -1))
        if at == len(rooms):
            room, number = max_tokens, len(parts)
            parts.append([])
        else:
            room, number = rooms.pop(at)
        parts[number].append(index)
        if room > lengths[index]:
            insort(rooms, (room - lengths[index], number))
    return parts


def _halved(parts: Partition, lengths: Sequence[int], count: int) -> Partition:
    """Divide the fullest part in two until there are ``count`` parts, or only single sequences are left."""
    fullest = [(-_tokens(part, lengths, False), number) for number, part in enumerate(parts)]
    heapq.heapify(fullest)
    while fullest and len(parts) < count:
        tokens, number = heapq.heappop(fullest)
        halves = _level(parts[number], lengths, -tokens, 2) if len(parts[number]) > 1 else None
        if halves is not None:
            parts[number], other = halves
            parts.append(other)
            for one in (number, len(parts) - 1):
                heapq.heappush(fullest, (-_tokens(parts[one], lengths, False), one))
    return parts


def _evened(parts: Partition, lengths: Sequence[int], max_tokens: int) -> Partition:
    """Balance parts: again and again, move a sequence from the fullest part to the emptiest, or exchange two of them.

    With few sequences in each part, their numbers of tokens may differ by several per cent before.
    """
    loads = sorted((_tokens(part, lengths, False), number) for number, part in enumerate(parts))
    loads = loads[: bisect_right(loads, (max_tokens, len(parts)))]  # a sequence over the limit stays alone
    for _ in range(2 * len(loads)):
        (least, low), (most, high) = loads[0], loads[-1]
        change = _best_change(parts[high], parts[low], lengths, most - least)
        if change is None:
            break
        given, taken, tokens = change
        parts[high].remove(given)
        parts[low].append(given)
        if taken is not None:
            parts[low].remove(taken)
            parts[high].append(taken)
        del loads[-1], loads[0]
        insort(loads, (least + tokens, low))
        insort(loads, (most - tokens, high))
    return parts


class _Change(NamedTuple):
    given: int
    taken: int | None
    tokens: int


def _best_change(fuller: Sequence[int], emptier: Sequence[int], lengths: Sequence[int], gap: int) -> _Change | None:
    """Find one sequence to move, or two to exchange, so that about half of the gap changes sides; None if none does."""
    offers = sorted((lengths[index], index) for index in emptier)
    best: _Change | None = None
    for given in fuller:
        at = bisect_left(offers, (lengths[given] - gap / 2, -1))
        for size, taken in [(0, None), *offers[max(0, at - 1) : at + 1]]:
            tokens = lengths[given] - size
            if 0 < tokens < gap and (best is None or abs(2 * tokens - gap) < abs(2 * best.tokens - gap)):
                best = _Change(given, taken, tokens)
    return best


def _even_rows(order: Sequence[int], lengths: Sequence[int], max_tokens: int, count: Callable[[int], int]) -> Partition:
    """Cut the sequences, longest first, into padded parts.

    The limit of a part is the smallest that needs no more parts than ``max_tokens`` does.
    """
    sizes = [lengths[index] for index in order]
    wanted = count(len(_cuts(sizes, max_tokens)))
    low, high = 1, max_tokens
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_cuts(sizes, middle)) <= wanted else (middle + 1, high)
    starts = _cuts(sizes, high)
    return [list(order[start:end]) for start, end in zip(starts, [*starts[1:], len(order)], strict=True)]


def _cuts(sizes: Sequence[int], limit: int) -> list[int]:
    """Return where parts begin: each has as many sequences as fit into ``limit``, padded to its first and longest."""
    starts: list[int] = []
    start = 0
    while start < len(sizes):
        starts.append(start)
        start += max(1, limit // sizes[start])
    return starts


def _dealt(parts: Partition, tokens: Sequence[int], dp_size: int) -> list[Partition]:
    """Assign each part, fullest first, to the replica with the fewest tokens among those that still lack parts."""
    each = len(parts) // dp_size
    shares: list[Partition] = [[] for _ in range(dp_size)]
    loads = [(0, rank) for rank in range(dp_size)]
    for number in sorted(range(len(parts)), key=lambda number: -tokens[number]):
        load, rank = heapq.heappop(loads)
        shares[rank].append(sorted(parts[number]))
        if len(shares[rank]) < each:
            heapq.heappush(loads, (load + tokens[number], rank))
    return shares
