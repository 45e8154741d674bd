"""The tiles of :mod:`anytron.kernels.log_prob` in Triton: logits are never written, forward or backward.

The structure is that of verl (``verl/utils/kernel/kernels.py``, ``_Split_Dlogits_N``) and of Megatron
(``megatron/core/fusions/linear_cross_entropy``, ``bwd_partial_dlogits``). The forward kernel is a product whose
blocks are summed up online and dropped. The backward kernel computes each block again and writes its gradient, in the
weight's element type, for one tile of the vocabulary at a time; torch computes the products with it. Apple's Cut
Cross-Entropy does not write the gradients either, but adds every block of them to both results atomically: results
vary from run to run, and it is fast because it leaves out blocks that are nearly 0.

Products are accumulated in float32, so that logits are never rounded to the weight's type. Anytron's default kernel in
plain torch rounds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from anytron_cuda.log_probs.kernels import differentiate, sum_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from anytron.kernels import Shard, Upstream


@dataclass(frozen=True)
class Blocks:
    """Sizes of the blocks of operands that one Triton program holds.

    Attributes:
        tokens: Rows of the hidden states.
        entries: Rows of the weight.
        inner: Tile of the hidden size.
        warps: Groups of 32 threads that share the work.
        stages: Number of loads in progress at the same time.
    """

    tokens: int = 128
    entries: int = 128
    inner: int = 64
    warps: int = 8
    stages: int = 3


PARTS = 64
"""Parts of the vocabulary that are summed up in parallel: with 8 blocks of tokens, there are more programs than an H100
has processors. The statistics of each part take 16 bytes per token."""


class TritonTiles:
    """Computes tiles of logits with Triton kernels: a :class:`anytron.kernels.log_prob.TileArithmetic`.

    Args:
        blocks: Sizes of blocks. The defaults are for 16-bit operands on Ampere and later GPUs, and fit the smallest
            shared memory of these, 100 kB (compute capability 8.6 and 8.9).
    """

    def __init__(self, blocks: Blocks | None = None) -> None:
        self._blocks = blocks or Blocks()

    def statistics(self, shard: Shard) -> Tensor:
        """Return the statistics of the shard's logits, float32 ``[parts, 4, tokens]``, computed in one launch."""
        blocks = self._blocks
        hidden, weight = shard.hidden.contiguous(), shard.weight.contiguous()
        tokens, hidden_size = hidden.shape
        entries = len(shard.weight)
        columns = triton.cdiv(entries, blocks.entries)
        each = triton.cdiv(columns, PARTS)
        parts = triton.cdiv(columns, each)  # none is empty
        statistics = shard.hidden.new_empty((parts, 4, tokens), dtype=torch.float32)
        if tokens:
            # Programs that run at the same time differ in their tokens: they read the same rows of the weight.
            self._start(
                sum_up[(triton.cdiv(tokens, blocks.tokens), parts)],
                *(hidden, weight, shard.labels, statistics),
                *(tokens, entries, hidden_size, 1.0 / shard.temperature, each),
            )
        return statistics

    def gradients(self, shard: Shard, upstream: Upstream) -> Iterator[tuple[slice, Tensor]]:
        """Yield each tile's rows of the weight and the gradient of its logits, which the next gradient overwrites."""
        blocks = self._blocks
        hidden = shard.hidden.contiguous()
        tokens, hidden_size = hidden.shape
        memory = shard.weight.new_empty(tokens * shard.width)
        needed = [upstream.peak, upstream.log_total, upstream.mean, upstream.grad_log_probs, upstream.grad_entropy]
        for rows in shard.tiles():
            weight = shard.weight[rows].contiguous()
            grad = memory[: tokens * len(weight)].view(tokens, len(weight))
            if tokens:
                self._start(
                    differentiate[(triton.cdiv(tokens, blocks.tokens), triton.cdiv(len(weight), blocks.entries))],
                    *(hidden, weight, shard.labels, *needed, grad),
                    *(tokens, len(weight), hidden_size, 1.0 / shard.temperature, rows.start),
                )
            yield rows, grad

    def _start(self, kernel: Callable[..., Any], hidden: Tensor, *others: Any) -> None:
        """Start a kernel where its operands are: Triton takes the current device and its stream."""
        blocks = self._blocks
        sizes = {"block_n": blocks.tokens, "block_v": blocks.entries, "block_h": blocks.inner}
        with torch.cuda.device_of(hidden):
            kernel(hidden, *others, **sizes, num_warps=blocks.warps, num_stages=blocks.stages)
