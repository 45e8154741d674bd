"""Divide sequences into micro-batches of balanced token counts, equally many for each data-parallel rank."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Partition = list[list[int]]
"""Indices of sequences, part by part."""


def karmarkar_karp(sizes: Sequence[int], parts: int) -> Partition:
    """Divide numbers into parts of nearly equal sums by the largest differencing method.

    N. Karmarkar, R. Karp, "The differencing method of set partitioning" (1982): every number starts
    as a partition of its own, and the two partitions of the largest spread are merged, the largest
    part of one with the smallest of the other, until one is left. Deterministic: ties are broken by
    index.

    Args:
        sizes: The numbers.
        parts: How many parts.

    Returns:
        ``parts`` lists of indices, each ascending, the parts in descending order of their sums. With
        fewer numbers than parts the last ones are empty.
    """
    if parts == 1:
        return [list(range(len(sizes)))]
    # A state is (-spread, tie-breaker, sums in descending order, members in the same order).
    states: list[tuple[int, int, list[int], Partition]] = []
    for index, size in enumerate(sizes):
        members: Partition = [[index], *([] for _ in range(parts - 1))]
        heapq.heappush(states, (-size, index, [size] + [0] * (parts - 1), members))
    while len(states) > 1:
        _, tie, sums, members = heapq.heappop(states)
        _, other_tie, other_sums, other_members = heapq.heappop(states)
        merged = sorted(
            (
                (a + b, left + right)
                for a, left, b, right in zip(sums, members, reversed(other_sums), reversed(other_members), strict=True)
            ),
            key=lambda part: -part[0],
        )
        sums, members = [part[0] for part in merged], [part[1] for part in merged]
        heapq.heappush(states, (sums[-1] - sums[0], min(tie, other_tie), sums, members))
    if not states:
        return [[] for _ in range(parts)]
    return [sorted(part) for part in states[0][3]]


def micro_batches(
    lengths: Sequence[int], max_tokens: int, dp_size: int, *, padded: bool = False, multiple: int = 1
) -> list[Partition]:
    """Plan one pass over some sequences.

    Args:
        lengths: Tokens of each sequence, each at least 1; at least one sequence.
        max_tokens: Tokens of a micro-batch at most; a longer sequence gets a micro-batch of its own.
        dp_size: Data-parallel replicas.
        padded: Each micro-batch is padded to its longest sequence, and the padding counts as tokens.
        multiple: The number of micro-batches of a replica is a multiple of this.

    Returns:
        ``[dp_size][micro-batches]`` lists of indices: every index once, every replica equally many
        micro-batches, as few as :func:`karmarkar_karp` fits into the limit; now and then another division would need
        one less, because balance comes first. Where there are fewer sequences than micro-batches some are empty: the
        engine must be given something of no weight there, because ranks wait for each other in every micro-batch.
    """
    # A sequence over the limit fills one micro-batch, however long it is.
    count = -(-sum(min(length, max_tokens) for length in lengths) // (max_tokens * dp_size * multiple)) * multiple
    while not _fits(parts := karmarkar_karp(lengths, count * dp_size), lengths, max_tokens, padded):
        count += multiple
    # Parts come in descending order: dealing them forth and back gives every replica about the same work.
    per_rank: list[Partition] = [[] for _ in range(dp_size)]
    for start in range(0, len(parts), dp_size):
        row = parts[start : start + dp_size]
        for rank, part in enumerate(row if (start // dp_size) % 2 == 0 else reversed(row)):
            per_rank[rank].append(part)
    return per_rank


def _fits(parts: Partition, lengths: Sequence[int], max_tokens: int, padded: bool) -> bool:
    def tokens(part: list[int]) -> int:
        sizes = [lengths[index] for index in part]
        return len(sizes) * max(sizes) if padded else sum(sizes)

    return all(len(part) <= 1 or tokens(part) <= max_tokens for part in parts)
