"""What an ``atten_mask`` with a ``sparse_mode`` means, and what the documentation demands of it.

Source: torch_npu 2.13, documentation of ``npu_fusion_attention``. True = MASKED everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from anytron_ascend_simulator.kernels.contract import ContractError, require

if TYPE_CHECKING:
    from torch import Tensor

UNLIMITED = 2147483647
"""Default of ``pre_tockens`` and ``next_tockens``."""
COMPRESSED = 2048
"""Side of a compressed mask."""
COMPRESSED_MODES = frozenset({2, 3, 4, 7, 8})
TND_ONLY_MODES = frozenset({7, 8})


@dataclass(frozen=True)
class Sparsity:
    """A mask and how to read it.

    Attributes:
        mode: ``sparse_mode``.
        mask: bool or uint8, 1 = masked; None = everything is seen, whatever mode and windows say.
        before: ``pre_tockens``: keys that a query sees before its own position.
        after: ``next_tockens``: keys that it sees after it.
        packed: Layout TND.
    """

    mode: int
    mask: Tensor | None
    before: int
    after: int
    packed: bool

    def check(self, batch: int, heads: int) -> None:
        """Check mode, dtype and shape; ``batch`` and ``heads`` are the queries'."""
        if self.mask is None:
            return
        require(self.mode in (0, 1, *COMPRESSED_MODES), f"sparse_mode {self.mode} is not modelled (0-4, 7, 8 are)")
        require(self.packed or self.mode not in TND_ONLY_MODES, f"sparse_mode {self.mode} is for layout TND only")
        require(self.mask.dtype in (torch.bool, torch.uint8), f"atten_mask is {self.mask.dtype}: bool or uint8")
        shape = tuple(self.mask.shape)
        if self.mode in COMPRESSED_MODES:
            self._check_compressed(shape)
            return
        if self.packed:
            require(len(shape) == 2, f"atten_mask {shape}: [maxSq, maxSkv] in layout TND")
            return
        allowed = shape[:-2] in ((), (1, 1), (batch, 1), (batch, heads))
        require(allowed, f"atten_mask {shape}: [B, N, Sq, Skv], [B, 1, Sq, Skv], [1, 1, Sq, Skv] or [Sq, Skv]")

    def _check_compressed(self, shape: tuple[int, ...]) -> None:
        require(
            shape[-2:] == (COMPRESSED, COMPRESSED) and all(size == 1 for size in shape[:-2]),
            f"sparse_mode {self.mode} needs the compressed {COMPRESSED}x{COMPRESSED} mask, not {shape}",
        )
        assert self.mask is not None
        triangle = torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(1)
        if not torch.equal(self.mask.reshape(COMPRESSED, COMPRESSED).bool(), triangle):
            raise ContractError("the compressed mask is the upper triangle without diagonal, 1 = masked")

    def masked(self, queries: int, keys: int, sequence: int = 0, sequences: int = 1) -> Tensor | None:
        """Masked pairs of one sequence of a packed batch: bool ``[Sq, Skv]`` or ``[*, *, Sq, Skv]``; None = none."""
        if self.mask is None:
            return None
        if self.mode in (0, 1):
            return self._explicit(queries, keys)
        mode, after = self.mode, self.after
        if mode == 7:  # a shard of right-down causal: the last sequence is a band
            mode, after = (4, after) if sequence == sequences - 1 else (3, 0)
        elif mode == 8:  # a shard of left-up causal: the first one is
            mode, after = (4, after) if sequence == 0 else (2, 0)
        query, key = torch.arange(queries)[:, None], torch.arange(keys)[None]
        shift = keys - queries
        if mode == 2:
            return key > query
        if mode == 3:
            return key > query + shift
        return (key < query + shift - self.before) | (key > query + shift + after)

    def _explicit(self, queries: int, keys: int) -> Tensor:
        assert self.mask is not None
        size = tuple(self.mask.shape[-2:])
        fits = size[0] >= queries and size[1] >= keys if self.packed else size == (queries, keys)
        require(fits, f"atten_mask {size} for {queries} queries and {keys} keys")
        mask = self.mask[..., :queries, :keys].bool()
        limited = self.before < UNLIMITED or self.after < UNLIMITED
        if self.mode == 0 and limited:
            query, key = torch.arange(queries)[:, None], torch.arange(keys)[None]
            outside = (key < query - self.before) | (key > query + self.after)
            require(
                bool((mask | ~outside).all()),
                f"sparse_mode 0: the mask keeps keys outside of the window of pre_tockens={self.before} and "
                f"next_tockens={self.after}, which the kernel does not look at",
            )
        return mask
