"""Another planner of micro-batches, far slower: the largest differencing method, tried for one count after another."""

from __future__ import annotations

import heapq


def karmarkar_karp(sizes, parts):
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
    states = []
    for index, size in enumerate(sizes):
        members = [[index], *([] for _ in range(parts - 1))]
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


def micro_batches(lengths, max_tokens, dp_size, *, padded=False, multiple=1):
    """As :func:`anytron.run.trainer.updates.micro_batches`."""
    # A sequence over the limit fills one micro-batch, however long it is.
    count = -(-sum(min(length, max_tokens) for length in lengths) // (max_tokens * dp_size * multiple)) * multiple
    while not _fits(parts := karmarkar_karp(lengths, count * dp_size), lengths, max_tokens, padded):
        count += multiple
    # Parts come in descending order: dealing them forth and back gives every replica about the same work.
    per_rank = [[] for _ in range(dp_size)]
    for start in range(0, len(parts), dp_size):
        row = parts[start : start + dp_size]
        for rank, part in enumerate(row if (start // dp_size) % 2 == 0 else reversed(row)):
            per_rank[rank].append(part)
    return per_rank


def _fits(parts, lengths, max_tokens, padded):
    def tokens(part):
        sizes = [lengths[index] for index in part]
        return len(sizes) * max(sizes) if padded else sum(sizes)

    return all(len(part) <= 1 or tokens(part) <= max_tokens for part in parts)
