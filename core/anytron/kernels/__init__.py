"""The contracts of the kernel hooks, their default kernels in pure torch, and functions to build other kernels."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anytron.kernels.attention import is_causal, make_attention
    from anytron.kernels.contract import (
        AttentionCall,
        AttentionKernel,
        AttentionSpec,
        KernelName,
        KernelSource,
        KernelSpec,
        LogProbKernel,
        LogProbSpec,
        zeros_from,
    )
    from anytron.kernels.log_prob import Shard, TileArithmetic, Upstream, make_log_prob
    from anytron.kernels.oracles.masks import ring_rows, token_pairs
    from anytron.kernels.packed_sequences import MicroBatchCache, Rows, forbidden_pairs, rearrange, rows_from
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
