"""How recurrent layers cut sequences into chunks of tokens that are computed together.

Shapes: B rows, S or T tokens, N chunks, H heads, C tokens of a chunk, X entries of a head.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from anytron.kernels.packed_sequences import Rows, rearrange, rows_from

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK = 64
"""Largest number of tokens in a chunk, as in Hugging Face's Gated DeltaNet and in flash-linear-attention."""


class Chunks(NamedTuple):
    """How tokens lie in chunks: first chunks of all sequences, then second chunks of those that have one, ...

    Attributes:
        there: Buffer rows -> tokens of chunks.
        back: Tokens of chunks -> buffer rows.
        steps: How many sequences have a first chunk, a second chunk, ...; never increasing.
        size: C.
    """

    there: Rows
    back: Rows
    steps: tuple[int, ...]
    size: int

    def cut(self, operand: Tensor) -> Tensor:
        """``[B, S, H, X]`` -> ``[N, H, C, X]``, zero after a sequence's end."""
        flat = rearrange(operand.flatten(0, 1), self.there, self.back)
        return flat.view(-1, self.size, *flat.shape[1:]).transpose(1, 2)

    def join(self, chunks: Tensor) -> Tensor:
        """``[N, H, C, X]`` -> ``[B * S, H, X]``, zero where no sequence is."""
        return rearrange(chunks.transpose(1, 2).flatten(0, 1), self.back, self.there)


def chunks_of(rows: int, tokens: int, cu_seqlens: Tensor | None, device: torch.device) -> Chunks:
    """Plan the chunks of the sequences of a micro-batch.

    Args:
        rows: B.
        tokens: S of each row.
        cu_seqlens: int32 ``[sequences + 1]`` of packed sequences, whose buffer has one row. None = each row is one. Its
            copy to the host waits for the device.
        device: Device of the operands.
    """
    lengths = (tokens,) * rows if cu_seqlens is None else tuple(cu_seqlens.diff().tolist()) or (0,)
    return _plan(lengths, rows * tokens, device)


@functools.lru_cache(maxsize=32)
def _plan(lengths: Sequence[int], total: int, device: torch.device) -> Chunks:
    """Plan the chunks of sequences that follow one another; all layers of a micro-batch find the same plan."""
    sizes = torch.tensor(lengths)
    starts = sizes.cumsum(0) - sizes
    order = sizes.argsort(descending=True, stable=True)
    sizes, starts = sizes[order], starts[order]
    longest = max(1, int(sizes[0]))
    steps = math.ceil(longest / CHUNK)
    chunk = math.ceil(longest / steps)
    ranks = torch.arange(steps)
    # [steps, sequences]: sequences are sorted, so that those with a chunk of a rank come first.
    exists = sizes > ranks[:, None] * chunk
    exists[0, 0] = True  # where all sequences are empty, one chunk of nothing
    offset = ranks[:, None, None] * chunk + torch.arange(chunk)
    source = torch.where(offset < sizes[None, :, None], starts[None, :, None] + offset, -1)[exists].flatten()
    real = source >= 0
    back = torch.full((total,), -1)
    back[source[real]] = torch.arange(source.numel())[real]
    return Chunks(rows_from(source, device), rows_from(back, device), tuple(exists.sum(1).tolist()), chunk)


def between(decay: Tensor) -> Tensor:
    """Return the decay from token j (column) to token i (row) of a chunk: ``exp(decay[i] - decay[j])``, 0 for j > i.

    Args:
        decay: ``[..., C, 1]``, sum of the logarithms of the decay up to each token, <= 0.
    """
    size = decay.shape[-2]
    later = torch.ones(size, size, dtype=torch.bool, device=decay.device).triu(1)
    # Masked before exp: above the diagonal it may overflow.
    return (decay - decay.transpose(-1, -2)).masked_fill(later, -torch.inf).exp()
