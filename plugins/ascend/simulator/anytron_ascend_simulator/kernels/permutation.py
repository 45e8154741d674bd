"""``npu_moe_token_permute``, ``npu_moe_token_unpermute`` and their gradients.

A token goes to its K experts: permuting copies it K times and sorts the copies by expert, stably; unpermuting
brings them back and sums them. Legend: N tokens, K experts of a token, H hidden size, P permuted rows.
``sorted_indices`` (int32 ``[N * K]``) holds *positions*: copy ``i``, of token ``i // K``, lies in row
``sorted_indices[i]``. It is the inverse of the argsort that Megatron calls by this name.

Source: torch_npu 2.13, documentation of both operators (``torch_npu/_op_plugin_docs.py``, the later entries);
gradients: documentation of ``aclnnMoeTokenPermuteGrad`` and ``aclnnMoeTokenUnpermuteGrad``. Computed in float32.
Not modelled, because the operators do not have it: ``padded_mode`` and ``restore_shape``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron_ascend_simulator.kernels.contract import require

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
MAX_TOP_K = 512
LIMIT = 16777215
"""The kernel sorts experts as float32: numbers of experts and of copies stay below 2^24 - 1."""
_NO_SHAPE = [1]
"""What op-plugin passes for ``restore_shape=None``."""


def _permute(
    tokens: Tensor, indices: Tensor, rows: int, padded_mode: bool, permuted: Tensor, sorted_indices: Tensor
) -> None:
    """``[N, H]`` and ``indices`` ``[N, K]`` or ``[N]`` -> ``[P, H]`` and ``[N * K]``.

    ``rows`` is P: ``num_out_tokens``, which op-plugin has made absolute (None and 0: all, negative: from the end).
    """
    require(not padded_mode, "padded_mode is not supported")
    require(tokens.dtype in FLOATS, f"tokens are {tokens.dtype}, not float16, bfloat16 or float32")
    require(indices.dtype in (torch.int32, torch.int64), f"indices are {indices.dtype}, not int32 or int64")
    require(indices.size(0) == tokens.size(0), f"indices {tuple(indices.shape)} do not match {tokens.size(0)} tokens")
    top_k = indices.size(1) if indices.dim() == 2 else 1
    _check_top_k(top_k)
    flat = indices.reshape(-1)
    require(flat.numel() < LIMIT, f"there are {flat.numel()} indices, but must be fewer than {LIMIT}")
    require(
        bool(((flat >= 0) & (flat < LIMIT)).all()),
        f"indices must be numbers of experts, at least 0 and less than {LIMIT}",
    )
    require(0 <= rows <= flat.numel(), f"num_out_tokens keeps {rows} rows, but there are {flat.numel()}")
    order = torch.argsort(flat, stable=True)
    permuted.copy_(tokens[order[:rows] // top_k])
    sorted_indices.copy_(torch.argsort(order))


def _permute_grad(
    permuted_grad: Tensor, sorted_indices: Tensor, top_k: int, padded_mode: bool, tokens_grad: Tensor
) -> None:
    """``[P, H]`` -> ``[N, H]``: the sum over a token's copies; dropped ones (position at least P) count zero."""
    require(not padded_mode, "padded_mode is not supported")
    require(permuted_grad.dtype in FLOATS, f"the gradient is {permuted_grad.dtype}, not float16, bfloat16 or float32")
    _check_top_k(top_k)
    require(
        sorted_indices.numel() == tokens_grad.size(0) * top_k,
        f"there are {sorted_indices.numel()} sorted_indices, but {tokens_grad.size(0)} tokens of {top_k} experts each",
    )
    check_permutation(sorted_indices)
    rows = permuted_grad.size(0)
    require(
        rows <= sorted_indices.numel(),
        f"the gradient has {rows} rows, but there are {sorted_indices.numel()} sorted_indices",
    )
    kept = permuted_grad.new_zeros(sorted_indices.numel(), permuted_grad.size(1), dtype=torch.float32)
    kept[:rows] = permuted_grad
    tokens_grad.copy_(kept[sorted_indices.long()].unflatten(0, (-1, top_k)).sum(1))


def _unpermute(
    permuted: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None,
    padded_mode: bool,
    restore_shape: list[int] | None,
    tokens: Tensor,
) -> None:
    """``[N * K, H]`` -> ``[N, H]``: ``tokens[n] = sum_k probs[n, k] * permuted[sorted_indices[n * K + k]]``.

    Without ``probs`` K is 1: copies come back, and are not summed.
    """
    top_k = _check_unpermute(permuted.dtype, permuted.size(0), sorted_indices, probs, padded_mode, restore_shape)
    found = permuted.float()[sorted_indices.long()].unflatten(0, (-1, top_k))
    tokens.copy_((found if probs is None else found * probs.float()[..., None]).sum(1))


def _unpermute_grad(
    permuted: Tensor | None,
    tokens_grad: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None,
    padded_mode: bool,
    restore_shape: list[int] | None,
    permuted_grad: Tensor,
    probs_grad: Tensor | None,
) -> None:
    """``[N, H]`` -> ``[N * K, H]``, and ``[N, K]`` for ``probs``, which needs the permuted tokens."""
    rows = permuted_grad.size(0)
    top_k = _check_unpermute(tokens_grad.dtype, rows, sorted_indices, probs, padded_mode, restore_shape)
    expected = (sorted_indices.numel() // top_k, permuted_grad.size(1))
    require(
        tuple(tokens_grad.shape) == expected,
        f"the gradient is {tuple(tokens_grad.shape)}, not {expected} like the tokens",
    )
    positions, upstream = sorted_indices.long(), tokens_grad.float()[:, None]
    weighted = upstream if probs is None else upstream * probs.float()[..., None]
    permuted_grad[positions] = weighted.flatten(0, 1).to(permuted_grad.dtype)
    if probs is not None:
        require(permuted is not None and probs_grad is not None, "the gradient of probs needs the permuted tokens")
        assert permuted is not None
        assert probs_grad is not None
        probs_grad.copy_((upstream * permuted.float()[positions].unflatten(0, (-1, top_k))).sum(-1))


def _check_unpermute(
    dtype: torch.dtype,
    rows: int,
    sorted_indices: Tensor,
    probs: Tensor | None,
    padded_mode: bool,
    restore_shape: list[int] | None,
) -> int:
    """Check the arguments of unpermuting and of its gradient; return K."""
    require(not padded_mode, "padded_mode is not supported")
    require(restore_shape in (None, _NO_SHAPE), f"restore_shape is {restore_shape}, but only None is supported")
    require(dtype in FLOATS, f"tokens are {dtype}, not float16, bfloat16 or float32")
    check_permutation(sorted_indices)
    require(
        sorted_indices.numel() == rows,
        f"there are {sorted_indices.numel()} sorted_indices, but {rows} permuted tokens: none may have been dropped",
    )
    if probs is None:
        return 1
    require(probs.dtype in FLOATS, f"probs are {probs.dtype}, not float16, bfloat16 or float32")
    require(probs.numel() == rows, f"probs are {tuple(probs.shape)}, but there are {rows} permuted tokens")
    _check_top_k(probs.size(1))
    return probs.size(1)


def check_permutation(sorted_indices: Tensor) -> None:
    """Check that indices are int32 and contain every position once."""
    require(sorted_indices.dtype == torch.int32, f"sorted_indices are {sorted_indices.dtype}, not int32")
    places = torch.arange(sorted_indices.numel(), dtype=torch.int32)
    require(
        bool(torch.equal(sorted_indices.sort().values, places)),
        f"sorted_indices must be the numbers from 0 to {sorted_indices.numel() - 1}, each once",
    )


def _check_top_k(top_k: int) -> None:
    require(0 < top_k <= MAX_TOP_K, f"there are {top_k} experts of a token, but must be 1 to {MAX_TOP_K}")


KERNELS: dict[str, Callable[..., None]] = {
    "aclnnMoeTokenPermute": _permute,
    "aclnnMoeTokenPermuteGrad": _permute_grad,
    "aclnnMoeTokenUnpermute": _unpermute,
    "aclnnMoeTokenUnpermuteGrad": _unpermute_grad,
}
