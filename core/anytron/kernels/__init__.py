"""Kernels: the contracts of the kernel hooks, neutral kernels in pure torch, and parts to build others from."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anytron.kernels.attention import make_attention
    from anytron.kernels.contract import (
        AttentionCall,
        AttentionKernel,
        AttentionSpec,
        KernelName,
        KernelSource,
        KernelSpec,
        LogProbKernel,
        LogProbSpec,
    )
    from anytron.kernels.log_prob import make_log_prob
    from anytron.kernels.log_prob_tiles import Shard, TileArithmetic, Upstream
    from anytron.kernels.micro_batches import MicroBatchCache
    from anytron.kernels.neutral_modes import is_causal
    from anytron.kernels.no_rows import zeros_from
    from anytron.kernels.oracles.masks import ring_rows, token_pairs
    from anytron.kernels.packed_sequences import Rows, forbidden_pairs, rearrange, rows_from
else:

    def __getattr__(name: str) -> object:
        from anytron.base.lazy import find

        return find(__name__, name)


__all__ = [
    "AttentionCall",
    "AttentionKernel",
    "AttentionSpec",
    "KernelName",
    "KernelSource",
    "KernelSpec",
    "LogProbKernel",
    "LogProbSpec",
    "MicroBatchCache",
    "Rows",
    "Shard",
    "TileArithmetic",
    "Upstream",
    "forbidden_pairs",
    "is_causal",
    "make_attention",
    "make_log_prob",
    "rearrange",
    "ring_rows",
    "rows_from",
    "token_pairs",
    "zeros_from",
]
