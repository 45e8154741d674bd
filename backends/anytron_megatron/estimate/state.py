"""Parameters, gradients and optimizer state of a model on one rank, in bytes.

Mixed precision with Adam keeps, for each parameter, a float32 copy and two float32 moments; replicas share them
with the distributed optimizer (Rajbhandari et al., arXiv:1910.02054, 3.1 and 5.1; the table "Theoretical memory
savings" in Megatron-Core's page on its distributed optimizer). Gradients are float32 on every replica: Megatron's
distributed optimizer shares the state, not the buffers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from anytron.base.traits import ParallelSizes
    from anytron.config.roles import OptimizerSection
    from anytron_megatron.estimate.sharding import Piece

GRADIENT_BYTES = 4
MASTER_BYTES, MOMENTS_BYTES = 4, 8


@dataclass(frozen=True)
class Held:
    """Numbers on one rank.

    Attributes:
        dense: Outside of routed experts.
        expert: In them.
    """

    dense: int
    expert: int

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Held:
        """Add up what a rank has."""
        sizes = [(piece.size, piece.expert) for piece in pieces]
        return cls(sum(size for size, expert in sizes if not expert), sum(size for size, expert in sizes if expert))

    @property
    def total(self) -> int:
        """Both."""
        return self.dense + self.expert


def optimizer_bytes(held: Held, optimizer: OptimizerSection, *, dtype: str, replicas: tuple[int, int]) -> int:
    """Bytes of the optimizer's state of what is trained, the mean of the ranks that share it, rounded up.

    Args:
        held: What is trained.
        optimizer: Adam, or SGD without momentum.
        dtype: Of the parameters.
        replicas: Ranks that share the state of dense and of expert parameters; (1, 1) = nothing is shared.
    """
    each = (MASTER_BYTES if dtype != "float32" else 0) + (MOMENTS_BYTES if optimizer.name == "adam" else 0)
    return math.ceil(held.dense * each / replicas[0]) + math.ceil(held.expert * each / replicas[1])


def sharing_ranks(sizes: ParallelSizes, *, distributed: bool) -> tuple[int, int]:
    """Ranks with the same parameters, which share an optimizer's state: of dense ones, and of experts."""
    if not distributed:
        return 1, 1
    same = sizes.data * sizes.context
    return same, max(1, same * sizes.tensor // (sizes.expert * sizes.expert_tensor))
