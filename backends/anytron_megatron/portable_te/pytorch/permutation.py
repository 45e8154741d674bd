"""Sort tokens by expert and back: replacements for ``transformer_engine.pytorch.permutation`` (``moe_permute_fusion``).

Arguments and results are those of Transformer Engine 2.8 (transformer_engine/pytorch/permutation.py), except for the
``row_id_map``, which only this module reads: int64 ``[2, rows]``, the expert and the token of each permuted row. A row
whose prob is 0 is copied, where Transformer Engine writes zeros; the sum of the rows is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.base.errors import EngineError
from anytron_megatron.portable_te.refusals import refuse, refuse_settings

if TYPE_CHECKING:
    from torch import Tensor


def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int | None = -1, max_token_num: int = -1, map_type: str = "mask"
) -> tuple[Tensor, Tensor]:
    """Copy each token once for each of its experts, sorted by expert and then by token.

    Args:
        inp: Tokens ``[T, H]``, any floating dtype.
        routing_map: ``[T, E]``, bool or integer; nonzero = the token is routed to the expert.
        num_out_tokens: Number of rows of the result, if the caller knows it; -1 or None = as many as nonzero entries.
        max_token_num: Size of a workspace, which is not needed here.
        map_type: ``"mask"``, the form of ``routing_map``; ``"index"`` is refused.

    Returns:
        The rows ``[rows, H]``, and the ``row_id_map`` for :func:`moe_unpermute`.

    Raises:
        EngineError: ``map_type`` is not ``"mask"``, ``routing_map`` has another number of tokens, or ``num_out_tokens``
            is not the number of nonzero entries.
    """
    del max_token_num
    _refuse_indices("moe_permute", map_type)
    if len(inp) != len(routing_map):
        raise _wrong(
            f"There are {len(inp)} tokens, and routing_map is for {len(routing_map)}.",
            why="the routing map has one row for each token",
            fix="pass the routing map of these tokens",
        )
    row_id_map = _row_id_map(routing_map, num_out_tokens)
    wide = inp.to(torch.promote_types(inp.dtype, torch.float32))  # so that gradients of a token are added in float32
    return wide.index_select(0, row_id_map[1]).to(inp.dtype), row_id_map


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int | None = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """Permute as :func:`moe_permute`, and select the rows' entries of ``probs`` ``[T, E]``.

    Returns:
        The rows ``[rows, H]``, their entries of ``probs`` ``[rows]``, and the ``row_id_map``.
    """
    permuted, row_id_map = moe_permute(inp, routing_map, num_out_tokens)
    experts, tokens = row_id_map
    return permuted, probs[tokens, experts], row_id_map


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | None = None,
    map_type: str = "mask",
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    """Add the rows of each token; the inverse of :func:`moe_permute`.

    Sums are computed in float32 at least, as in Transformer Engine.

    Args:
        inp: Rows ``[rows, H]``.
        row_id_map: From :func:`moe_permute`.
        merging_probs: Weights of the sums, ``[T, E]``; None = 1.
        restore_shape: ``[T, H]``; None = the shape of ``inp``, which is right for one expert per token.
        map_type: As in :func:`moe_permute`.
        probs: Old name of ``merging_probs``.
        pad_offsets: Refused.

    Returns:
        ``[T, H]``, with the dtype of ``inp``; zeros for a token without experts.

    Raises:
        EngineError: ``map_type`` is not ``"mask"``, ``pad_offsets`` are given, or both ``merging_probs`` and ``probs``
            are given.
    """
    _refuse_indices("moe_unpermute", map_type)
    refuse_settings("permutation.moe_unpermute", {"pad_offsets": pad_offsets})
    if merging_probs is not None and probs is not None:
        raise _wrong(
            "Both merging_probs and probs are given.", why="probs is its old name", fix="pass merging_probs alone"
        )
    weights = merging_probs if merging_probs is not None else probs
    experts, tokens = row_id_map
    rows = inp.to(torch.promote_types(inp.dtype, torch.float32))
    if weights is not None:
        rows = rows * weights[tokens, experts].to(rows.dtype).unsqueeze(-1)
    total = rows.new_zeros(inp.shape if restore_shape is None else restore_shape)
    return total.index_add(0, tokens, rows).to(inp.dtype)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Split ``inp`` ``[rows, H]`` into chunks, and join them in another order.

    Args:
        inp: The rows.
        split_sizes: Rows of each chunk, integers ``[chunks]``; their sum is ``rows``.
        sorted_index: Number of the chunk at each place, integers ``[chunks]``.
    """
    chunks = inp.split(split_sizes.tolist())
    return torch.cat([chunks[index] for index in sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """Sort as :func:`moe_sort_chunks_by_index`, and also ``probs`` ``[rows]``."""
    return (
        moe_sort_chunks_by_index(inp, split_sizes, sorted_index),
        moe_sort_chunks_by_index(probs, split_sizes, sorted_index),
    )


def _row_id_map(routing_map: Tensor, expected: int | None) -> Tensor:
    found = routing_map.T.nonzero().T
    if expected is not None and int(expected) not in (-1, found.shape[1]):
        raise _wrong(
            f"num_out_tokens is {int(expected)}, and routing_map has {found.shape[1]} nonzero entries.",
            why="there is one row for each nonzero entry of routing_map",
            fix="pass num_out_tokens=-1, or the number of nonzero entries",
        )
    return found


def _wrong(what: str, *, why: str, fix: str) -> EngineError:
    return EngineError(what, where="transformer_engine.pytorch.permutation", why=why, fix=fix)


def _refuse_indices(function: str, map_type: str) -> None:
    if map_type != "mask":
        refuse(f"permutation.{function}", f"routing map of map_type={map_type!r}", 'pass map_type="mask"')
