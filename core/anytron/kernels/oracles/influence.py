"""Find out which tokens attend to which, by changing one key and its value after the other.

No kernel mode has to be known by name, and no mask has to be read: what counts is which outputs move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.kernels.oracles.masks import PADDING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from anytron.sequences.layout import SequenceLayout
    from anytron.sequences.masks import Pair

    Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
    """Attention on operands as they lie in a layout: ``[R, C, H, D]`` each -> ``[R, C, H, Dv]``."""

IN_PADDING = 7.0
"""What stands in padding slots of queries, keys and values: finite, and far off if a real token sees it."""
PUSH = 1000.0
"""Added to the value of one token: the outputs that see it move by far more than the rounding of the others."""
MOVED = {torch.float32: 1e-3}
"""An output that differs by no more has not moved; in other element types by :data:`MOVED_ELSEWHERE`."""
MOVED_ELSEWHERE = 0.01


def influence(attend: Attend, operands: Sequence[Tensor], layout: SequenceLayout, device: torch.device) -> set[Pair]:
    """Find the pairs (query token, key token) of which the second moves the output of the first.

    Args:
        attend: The attention, within the scope of its micro-batch.
        operands: Queries, keys and values of all tokens, floating point ``[T, H, D]``, on any device.
        layout: Of this rank; on ``device``.
        device: Where ``attend`` computes.

    Returns:
        Flat tokens; a key may be :data:`~anytron.kernels.oracles.masks.PADDING`. An output that becomes NaN has moved.
    """
    query, key, value = (layout.pack(operand.to(device), IN_PADDING) for operand in operands)
    limit = MOVED.get(value.dtype, MOVED_ELSEWHERE)
    shown = layout.token_index.view(layout.shape)
    pairs: set[Pair] = set()
    with torch.no_grad():
        before = attend(query, key, value).float()
        for token in range(layout.num_tokens + 1):  # the last stands for all padding
            chosen = (shown == token)[..., None, None]
            after = attend(query, key + chosen.to(key.dtype), value + (PUSH * chosen).to(value.dtype)).float()
            moved = ~((after - before).abs().amax((-1, -2)) <= limit) & layout.valid
            name = PADDING if token == layout.num_tokens else token
            pairs |= {(seeing, name) for seeing in shown[moved].tolist()}
    return pairs
