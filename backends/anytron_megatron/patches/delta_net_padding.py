"""Keep padding out of Gated DeltaNet, whose layers receive no mask."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch

from anytron.base.errors import EngineError
from anytron.sequences.masks import current_mask
from anytron.sequences.planning import zigzag_order

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn


def leave_out_padding(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``GatedDeltaNet.forward``: set padding of rows to zero before and after; it has no gradient.

    A zero stays zero in the layer's norm and projections (none has a bias), is to the convolution what comes
    before a sequence's start, and has key and value 0, so it adds nothing to the recurrent state. The state
    decays at padding, which no real token sees: before the first one it is zero, and after the last one nothing
    reads it. Packed sequences need no mask: kernels start afresh at each sequence, whose padding comes last.

    Raises:
        EngineError: The layer runs outside of a micro-batch's scope, or the shapes of mask and rows differ.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        given = signature.bind(self, hidden_states, *args, **kwargs).arguments
        if given.get("packed_seq_params") is not None:
            return original(self, hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
        padding = _padding(self, hidden_states)
        # masked_fill, not a product: the gradient is 0 even where padding holds NaN.
        output, bias = original(self, hidden_states.masked_fill(padding, 0), *args, **kwargs)
        return output.masked_fill(padding, 0), bias

    return forward


def _padding(layer: Any, hidden_states: Tensor) -> Tensor:
    """Mark padding among a layer's inputs: bool ``[S, B, 1]``, of this rank's part of ``S``, True = MASKED."""
    mask = current_mask()
    if mask is None or mask.linear_attn_mask is None:
        raise EngineError(
            "A Gated DeltaNet layer does not know which tokens are padding.",
            where=f"layer {layer.layer_number}",
            why="it runs outside of its micro-batch's scope" if mask is None else "the mask has no linear_attn_mask",
            fix="run the model inside anytron.sequences.masks.scope_of(mask), or on packed sequences",
        )
    padding = ~mask.linear_attn_mask.t()
    context, parts = layer.pg_collection.cp, layer.sp_size
    rows, columns = hidden_states.shape[:2]
    if padding.shape != (rows * parts * context.size(), columns):
        raise EngineError(
            "The mask of a Gated DeltaNet layer has another shape than its input.",
            where=f"layer {layer.layer_number}",
            why=f"linear_attn_mask is {tuple(mask.linear_attn_mask.shape)} (batch, sequence), the input "
            f"{(rows, columns)} (sequence over {parts * context.size()} ranks, batch)",
        )
    if context.size() > 1:
        order = zigzag_order(torch.full((1,), len(padding), device=padding.device), context.size(), len(padding))
        padding = padding.index_select(0, order.chunk(context.size())[context.rank()])
    if parts > 1:
        # With sequence parallelism the ranks hold consecutive parts of these rows.
        padding = padding.chunk(parts)[layer.pg_collection.tp.rank()]
    return padding[..., None]
