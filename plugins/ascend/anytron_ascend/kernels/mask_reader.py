"""Read a mask as ``npu_fusion_attention`` does: which token may attend to which.

Written from the operator's documentation (torch_npu 2.13), so that ``anytron verify`` can check the masks of
platforms whose modules call the operator themselves.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from anytron.kernels import ring_rows, token_pairs
from anytron.sequences import AttnMask, Polarity
from anytron_ascend.kernels.attention import COMPRESSED, UNLIMITED, compressed_mask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron import ModelTraits
    from anytron.sequences import Pair, SequenceLayout


def read_mindspeed(mask: AttnMask, layouts: Sequence[SequenceLayout], traits: ModelTraits) -> set[Pair]:
    """Read a mask as MindSpeed's attention does, which makes the compressed triangle itself if it gets no mask.

    ``layouts`` has the layout of each context-parallel shard, in rank order.

    Raises:
        ValueError: The operator does not allow such a mask.
    """
    del traits  # MindSpeed's attention has no window
    forbidden = mask.read_as(Polarity.MASKED)
    if forbidden is None:
        forbidden = compressed_mask(torch.device("cpu"))
    return read_npu_fusion_attention(mask.kernel_mode, forbidden, layouts)


def read_npu_fusion_attention(
    mode: str, forbidden: torch.Tensor | None, layouts: Sequence[SequenceLayout]
) -> set[Pair]:
    """Read a ``sparse_mode`` together with its ``atten_mask``.

    The mode is written ``sparse_mode=4,pre_tokens=128,next_tokens=0``. 0: the given mask and the
    window of ``pre_tokens`` and ``next_tokens``; 1: the given mask; 2: left-up causal; 3: right-down
    causal; 4: band, from the right-down corner; 2 to 4 need the compressed mask. Without a mask, mode and
    windows are ignored. thd is TND: sequences end where ``cu_seqlens_padded[1:]`` says; several
    layouts are shards of MindSpeed's ring attention, in zigzag order. ``forbidden`` is ``atten_mask``, True = MASKED.

    Raises:
        ValueError: The operator does not allow such a mask.
    """
    modes = re.fullmatch(r"sparse_mode=(\d)(?:,pre_tokens=(-?\d+))?(?:,next_tokens=(-?\d+))?", mode)
    if modes is None or int(modes[1]) > 4:
        raise ValueError(f"the kernel mode {mode!r} names no sparse_mode from 0 to 4, as sparse_mode=3 does")
    sparse, before, after = int(modes[1]), int(modes[2] or UNLIMITED), int(modes[3] or UNLIMITED)
    rows = ring_rows(layouts)
    if forbidden is None:
        return token_pairs(rows, lambda _row, _query, _key: True)
    if sparse >= 2:
        triangle = torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(1)
        if forbidden.shape != triangle.shape or not torch.equal(forbidden.cpu(), triangle):
            raise ValueError(
                f"sparse_mode {sparse} needs the compressed mask, an upper triangle {tuple(triangle.shape)}, but this "
                f"mask {tuple(forbidden.shape)} differs from it"
            )
        # Queries and keys of a training sequence are as many: both corners give the same causal rule.
        if sparse in (2, 3):
            return token_pairs(rows, lambda _, query, key: key <= query)
        return token_pairs(rows, lambda _, query, key: query - before <= key <= query + after)
    if layouts[0].format == "thd" or len(layouts) > 1:
        raise ValueError("a mask [B, 1, S, S] cannot describe packed sequences, or rows that several ranks share")

    def allowed(row: int, query: int, key: int) -> bool:
        inside = sparse == 1 or query - before <= key <= query + after
        return inside and not bool(forbidden[row, 0, query, key])

    return token_pairs(rows, allowed)
