"""Company-invariant kernels: a row's bits do not depend on what else is in the call.

Libraries choose how to add up a product by the product's shape: the same row times the same matrix differs in its last
bits with the number of rows beside it. So a token's log-prob differs between decoding, where it is one of a few rows,
and training, where it is one of thousands. Here all products have one shape: rows and weights are cut into tiles of
constant size, and the last tile is filled up with zeros. What remains is that a library computes each entry of a
product in the same way, wherever in the tile it is. The rules ``invariant-...`` of ``anytron conformance`` show whether
a device does.

Only forward passes are invariant. Gradients are computed as everywhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROWS = 64
"""Rows of a tile. Decoding computes at least as many, which costs little, because it waits for the weights."""
COLUMNS = 256
"""Rows of the weight in a tile: a fused projection gives the same bits as separate ones."""
KEYS = 64
"""Keys of one partial sum of attention, counted from a sequence's first key."""
_VECTOR = 64
"""Elements after which a vectorised loop on the host computes the rest one by one, by another formula: a multiple of
the elements of two vectors of 512 bits in any type."""
_SERIAL = 511 * _VECTOR
"""Elements that torch computes in one loop on the host: it shares out 32,768 and more among threads, and each thread's
part has such a rest."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply rows by a weight: each entry of the result depends on its row and on its row of the weight only.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``, in the type of ``x``.
        bias: ``[N]``, or None.

    Returns:
        ``[..., N]``.
    """
    result: Tensor = _Linear.apply(x, weight)  # type: ignore[no-untyped-call]
    return result if bias is None else result + bias


def grouped_mm(x: Tensor, weights: Sequence[Tensor], splits: Sequence[int]) -> Tensor:
    """As :func:`anytron.kernels.fused.grouped_mm`, each group by :func:`linear`."""
    parts = torch.split(x, list(splits))
    return torch.cat([linear(part, weight, None) for part, weight in zip(parts, weights, strict=True)])


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight.T`` in tiles of one shape, without a gradient.

    ``x`` is ``[M, K]`` and ``weight`` ``[N, K]`` of the same type, which is that of the result ``[M, N]``.
    """
    count, entries = x.shape[0], weight.shape[0]
    rows = filled_up(x, ROWS)
    result = x.new_empty(rows.shape[0], entries)
    for first in range(0, entries, COLUMNS):
        columns = slice(first, first + COLUMNS)
        tile = filled_up(weight[columns], COLUMNS).t()
        for begin in range(0, rows.shape[0], ROWS):
            place = result[begin : begin + ROWS, columns]
            place.copy_(torch.mm(rows[begin : begin + ROWS], tile)[:, : place.shape[1]])
    return result[:count]


def sigmoid(input: Tensor) -> Tensor:
    """Return the sigmoid of each element, by one formula for all, in the shape and type of ``input``."""
    return _each(torch.sigmoid, input)


def silu(input: Tensor) -> Tensor:
    """Return ``input * sigmoid(input)`` of each element, by one formula for all, in the shape and type of ``input``."""
    return _each(functional.silu, input)


class OneFormula(TorchFunctionMode):
    """While it is entered, ``torch.sigmoid``, ``Tensor.sigmoid`` and ``functional.silu`` have one formula for all.

    Calls that write into a tensor (``out``, ``inplace``) raise ``TypeError``.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        settings = {name: value for name, value in (kwargs or {}).items() if value is not False}
        if func in (torch.sigmoid, torch.Tensor.sigmoid, functional.sigmoid):
            return sigmoid(*args, **settings)
        if func is functional.silu:
            return silu(*args, **settings)
        return func(*args, **(kwargs or {}))


def _each(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if not x.is_cpu:
        return function(x)
    flat = functional.pad(x.flatten(), (0, -x.numel() % _VECTOR))
    parts = flat.split(_SERIAL) if torch.get_num_threads() > 1 else [flat]
    return torch.cat([function(part) for part in parts])[: x.numel()].view_as(x)


def filled_up(x: Tensor, multiple: int) -> Tensor:
    """Add rows of zeros to ``x`` ``[M, K]``, so that their number is a multiple."""
    missing = -x.shape[0] % multiple
    return functional.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad
        flat = grad.reshape(-1, grad.shape[-1])
        return (
            (flat @ weight).view_as(x) if of_x else None,
            flat.t() @ x.reshape(-1, x.shape[-1]) if of_weight else None,
        )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As torch's ``scaled_dot_product_attention``: a query's result depends on the keys that it sees only.

    It is computed in float32, with the exact largest score of each row, and with partial sums over :data:`KEYS` keys
    that are added in order: keys that a query does not see add nothing, and no order depends on their number. The
    backward pass is that of torch's operator.

    Args:
        query: ``[B, H, S, D]``.
        key: ``[B, G, L, D]``.
        value: ``[B, G, L, Dv]``.
        attn_mask: bool, broadcastable to ``[B, H, S, L]``, True = KEEP; each query must see a key.
        dropout_p: Must be 0.
        is_causal: Whether query i sees keys 0 to i; then there are as many queries as keys.
        scale: Factor of the scores; None = ``D ** -0.5``.
        enable_gqa: Whether G may be smaller than H.

    Returns:
        ``[B, H, S, Dv]`` in the type of ``query``.

    Raises:
        ValueError: ``dropout_p`` is not 0.
    """
    if dropout_p:
        raise ValueError("company-invariant attention has no dropout")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    result: Tensor = _Attention.apply(query, key, value, attn_mask, is_causal, scale, enable_gqa)  # type: ignore[no-untyped-call]
    return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
        grouped: bool,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.settings = {"is_causal": causal, "scale": scale, "enable_gqa": grouped}
        return _attend(query, key, value, mask, causal, scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *operands, mask = ctx.saved_tensors
        with torch.enable_grad():
            query, key, value = (operand.detach().requires_grad_() for operand in operands)
            output = functional.scaled_dot_product_attention(query, key, value, mask, **ctx.settings)
        return (*torch.autograd.grad(output, (query, key, value), grad), None, None, None, None)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    batch, heads, length, width = query.shape
    groups, keys, wide = key.shape[1], key.shape[2], value.shape[-1]
    shared = heads // groups
    # Query heads that share keys are rows of one product.
    rows = query.float().reshape(batch * groups, shared * length, width)
    columns, values = (
        functional.pad(part.float(), (0, 0, 0, -keys % KEYS)).reshape(batch * groups, -1, part.shape[-1])
        for part in (key, value)
    )
    visible = torch.arange(columns.shape[1], device=query.device) < keys
    if causal:
        visible = visible & (
            torch.arange(columns.shape[1], device=query.device) <= torch.arange(length, device=query.device)[:, None]
        )
    if mask is not None:
        visible = visible & functional.pad(mask, (0, -keys % KEYS))
    visible = visible.expand(batch, heads, length, -1).reshape(batch * groups, shared * length, -1)
    result = query.new_empty(batch * groups, shared * length, wide)
    for begin in range(0, shared * length, ROWS):
        part = slice(begin, begin + ROWS)
        count = rows[:, part].shape[1]
        missing = (0, 0, 0, ROWS - count)
        seen = functional.pad(visible[:, part], missing, value=True)
        answer = _attend_rows(functional.pad(rows[:, part], missing), columns, values, seen, scale)
        result[:, part] = answer[:, :count].to(query.dtype)
    return result.view(batch, heads, length, wide)


def _attend_rows(rows: Tensor, columns: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Attend with one tile of rows, float32 ``[n, ROWS, D]``, to all keys ``[n, L, D]``."""
    blocks = [slice(begin, begin + KEYS) for begin in range(0, columns.shape[1], KEYS)]
    blocks = [block for block in blocks if bool(seen[..., block].any())]
    scores = [
        torch.bmm(rows, columns[:, block].transpose(1, 2)).mul_(scale).masked_fill_(~seen[..., block], -torch.inf)
        for block in blocks
    ]
    peak = torch.stack([score.amax(-1) for score in scores]).amax(0)[..., None]
    total, output = torch.zeros_like(peak), rows.new_zeros(*rows.shape[:2], values.shape[-1])
    for score, block in zip(scores, blocks, strict=True):
        weights = score.sub_(peak).exp_()
        total += weights.sum(-1, keepdim=True)
        output += torch.bmm(weights, values[:, block].contiguous())
    return output / total
