"""``npu_moe_token_permute_with_routing_map``, its inverse, and their gradients: what MindSpeed 0.16 calls.

Legend as in :mod:`anytron_ascend_simulator.kernels.permutation`, and E experts. The routing map is ``[N, E]``, bool or
int8, with K ones in every row; the rows of the permuted buffer correspond to these ones, ordered by expert and then by
token.

Source: torch_npu 2.13, documentation of both operators (``torch_npu/_op_plugin_docs.py``), and CANN's of
``aclnnMoeToken{Permute,Unpermute}WithRoutingMap``. Computed in float32. Not modelled: ``drop_and_pad``, and
-1 in ``sorted_indices`` (a token with fewer than K experts).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron_ascend_simulator.kernels.contract import require
from anytron_ascend_simulator.kernels.permutation import FLOATS, MAX_TOP_K, check_permutation

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

UNUSED = -1
"""Fills ``out_index`` and ``permuted_token_id``, which mean something in ``drop_and_pad`` only."""


def _permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None,
    rows: int,
    drop_and_pad: bool,
    permuted: Tensor,
    permuted_probs: Tensor | None,
    sorted_indices: Tensor,
) -> None:
    """``[N, H]``, probs ``[N, E]`` -> ``[N * K, H]``, ``[N * K]`` and positions ``[N * K]``; ``rows`` is N * K."""
    require(not drop_and_pad, "drop_and_pad is not modelled")
    routed = _check_map(routing_map, tokens.size(0), rows // max(tokens.size(0), 1))
    _check_dtypes(tokens.dtype, probs)
    holders = _holders(routed)
    permuted.copy_(tokens[holders])
    sorted_indices.copy_(torch.argsort(holders, stable=True))
    if probs is not None:
        require(
            probs.shape == routing_map.shape,
            f"probs are {tuple(probs.shape)}, not {tuple(routing_map.shape)} like routing_map",
        )
        assert permuted_probs is not None
        permuted_probs.copy_(probs.T[routed.T])


def _permute_grad(
    permuted_grad: Tensor,
    permuted_probs_grad: Tensor | None,
    sorted_indices: Tensor,
    routing_map: Tensor,
    experts: int,
    count: int,
    drop_and_pad: bool,
    tokens_grad: Tensor,
    probs_grad: Tensor | None,
) -> None:
    """Sum gradients over a token's copies, to ``[N, H]``; scatter gradients of probs to ``[N, E]``."""
    require(not drop_and_pad, "drop_and_pad is not modelled")
    require(
        tuple(routing_map.shape) == (count, experts),
        f"routing_map is {tuple(routing_map.shape)}, not {(count, experts)}",
    )
    top_k = permuted_grad.size(0) // count
    routed = _check_map(routing_map, count, top_k)
    check_permutation(sorted_indices)
    tokens_grad.copy_(permuted_grad.float()[sorted_indices.long()].unflatten(0, (count, top_k)).sum(1))
    if probs_grad is not None:
        assert permuted_probs_grad is not None
        _scatter(probs_grad, routed, permuted_probs_grad)


def _unpermute(
    permuted: Tensor,
    sorted_indices: Tensor,
    routing_map: Tensor | None,
    probs: Tensor | None,
    drop_and_pad: bool,
    restore_shape: list[int],
    tokens: Tensor,
    out_index: Tensor,
    permuted_token_id: Tensor,
    permuted_probs: Tensor | None,
) -> None:
    """``[N * K, H]`` -> ``[N, H]``: the sum over a token's copies, weighted by ``probs`` if given."""
    require(not drop_and_pad, "drop_and_pad is not modelled")
    require(
        permuted.size(1) == restore_shape[1],
        f"restore_shape is {restore_shape}, but rows have {permuted.size(1)} numbers",
    )
    weighted = permuted.float()
    if probs is not None:
        weights = _weights(permuted.size(0), restore_shape[0], permuted.dtype, routing_map, probs)
        assert permuted_probs is not None
        permuted_probs.copy_(weights)
        weighted = weighted * weights.float()[:, None]
    top_k = _check_positions(sorted_indices, permuted.size(0), restore_shape[0])
    tokens.copy_(weighted[sorted_indices.long()].unflatten(0, (-1, top_k)).sum(1))
    out_index.fill_(UNUSED)
    permuted_token_id.fill_(UNUSED)


def _unpermute_grad(
    tokens_grad: Tensor,
    sorted_indices: Tensor,
    _same: Tensor,
    routing_map: Tensor | None,
    permuted: Tensor | None,
    probs: Tensor | None,
    drop_and_pad: bool,
    restore_shape: list[int],
    permuted_grad: Tensor,
    probs_grad: Tensor | None,
) -> None:
    """Copy gradients to a token's copies, ``[N * K, H]``; compute gradients of probs, ``[N, E]``, 0 where the map is 0.

    Without ``drop_and_pad``, ``sorted_indices`` are passed as ``out_index`` and as ``permuted_token_id``.
    """
    require(not drop_and_pad, "drop_and_pad is not modelled")
    rows = permuted_grad.size(0)
    top_k = _check_positions(sorted_indices, rows, restore_shape[0])
    require(
        tuple(tokens_grad.shape) == tuple(restore_shape),
        f"the gradient is {tuple(tokens_grad.shape)}, not {restore_shape}",
    )
    upstream = torch.empty(rows, tokens_grad.size(1))
    upstream[sorted_indices.long()] = tokens_grad.float().repeat_interleave(top_k, 0)
    if probs is None:
        permuted_grad.copy_(upstream)
        return
    weights = _weights(rows, restore_shape[0], tokens_grad.dtype, routing_map, probs)
    permuted_grad.copy_(upstream * weights.float()[:, None])
    require(permuted is not None, "the gradient of probs needs the permuted tokens")
    assert permuted is not None
    assert routing_map is not None
    assert probs_grad is not None
    _scatter(probs_grad, routing_map.bool(), (upstream * permuted.float()).sum(-1))


def _holders(routed: Tensor) -> Tensor:
    """The token of which each permuted row is a copy: int64 ``[N * K]``."""
    return routed.T.nonzero()[:, 1]


def _weights(rows: int, count: int, dtype: torch.dtype, routing_map: Tensor | None, probs: Tensor) -> Tensor:
    """The probabilities in the order of rows, ``[N * K]``."""
    require(routing_map is not None, "with probs, a routing_map is needed")
    assert routing_map is not None
    _check_dtypes(dtype, probs)
    require(
        probs.shape == routing_map.shape,
        f"probs are {tuple(probs.shape)}, not {tuple(routing_map.shape)} like routing_map",
    )
    return probs.T[_check_map(routing_map, count, rows // count).T]


def _scatter(target: Tensor, routed: Tensor, values: Tensor) -> None:
    """Write values of rows where the map has its ones; ``[N, E]``."""
    target.zero_()
    target.T[routed.T] = values.to(target.dtype)


def _check_map(routing_map: Tensor, count: int, top_k: int) -> Tensor:
    """Check a routing map; return it as bool."""
    require(routing_map.dtype in (torch.bool, torch.int8), f"routing_map is {routing_map.dtype}, not bool or int8")
    require(
        routing_map.dim() == 2 and routing_map.size(0) == count,
        f"routing_map is {tuple(routing_map.shape)}, but there are {count} tokens",
    )
    if routing_map.dtype == torch.int8:
        require(bool(((routing_map == 0) | (routing_map == 1)).all()), "a routing_map of int8 must hold only 0 and 1")
    require(
        0 < top_k < MAX_TOP_K, f"num_out_tokens // tokens is {top_k}, but must be at least 1 and less than {MAX_TOP_K}"
    )
    routed = routing_map.bool()
    ones = sorted(set(routed.sum(1).tolist()))
    require(ones == [top_k], f"every row of routing_map must have num_out_tokens // tokens = {top_k} ones, not {ones}")
    return routed


def _check_positions(sorted_indices: Tensor, rows: int, count: int) -> int:
    """Check ``sorted_indices``; return K."""
    require(not bool((sorted_indices == -1).any()), "-1 in sorted_indices is not modelled")
    check_permutation(sorted_indices)
    require(
        sorted_indices.numel() == rows, f"there are {sorted_indices.numel()} sorted_indices, but {rows} permuted tokens"
    )
    require(rows % count == 0, f"{rows} permuted tokens are not a multiple of {count} tokens")
    return rows // count


def _check_dtypes(dtype: torch.dtype, probs: Tensor | None) -> None:
    require(dtype in FLOATS, f"tokens are {dtype}, not float16, bfloat16 or float32")
    if probs is not None:
        allowed = (dtype, torch.float32) if dtype == torch.bfloat16 else (dtype,)
        require(
            probs.dtype in allowed,
            f"probs are {probs.dtype}, not {dtype} like the tokens (or float32 if these are bfloat16)",
        )


KERNELS: dict[str, Callable[..., None]] = {
    "aclnnMoeTokenPermuteWithRoutingMap": _permute,
    "aclnnMoeTokenPermuteWithRoutingMapGrad": _permute_grad,
    "aclnnMoeTokenUnpermuteWithRoutingMap": _unpermute,
    "aclnnMoeTokenUnpermuteWithRoutingMapGrad": _unpermute_grad,
}
