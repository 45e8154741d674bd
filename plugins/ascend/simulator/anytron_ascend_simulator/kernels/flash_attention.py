"""``npu_fusion_attention`` forward and backward, computed in float32, behind each entry point that torch_npu calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from anytron_ascend_simulator.kernels.attention_inputs import INVALID_ROWS, Attention, Attributes, Piece
from anytron_ascend_simulator.kernels.contract import require

if TYPE_CHECKING:
    from torch import Tensor

TINY = torch.finfo(torch.float32).tiny


def _scores(piece: Piece, attention: Attention) -> tuple[Tensor, Tensor]:
    """Scores with masked ones at -inf, and values, heads of both repeated for grouped queries."""
    group = piece.query.size(-3) // piece.key.size(-3)
    scores = piece.query @ piece.key.repeat_interleave(group, -3).transpose(-1, -2) * attention.attributes.scale
    if piece.masked is not None:
        scores = scores.masked_fill(piece.masked, float("-inf"))
        # With sinks the large negative number leaves such a row to its sink.
        if attention.attributes.inner_precise != INVALID_ROWS and attention.sinks is None:
            hidden = piece.masked.all(-1, keepdim=True).expand_as(scores)
            scores = torch.where(hidden, torch.zeros(()), scores)
    return scores, piece.value.repeat_interleave(group, -3)


def _dropped(weights: Tensor, piece: Piece, attention: Attention) -> Tensor:
    return weights if piece.kept is None else weights.where(piece.kept, 0.0) / attention.attributes.keep_prob


def _forward(piece: Piece, attention: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[..., N, Sq, Dv]``, softmax maximum and sum ``[..., N, Sq, 1]``; of the sinks too, if there are any."""
    scores, values = _scores(piece, attention)
    maximum = scores.amax(-1, keepdim=True)
    sinks = None if attention.sinks is None else attention.sinks[:, None, None]
    maximum = maximum.masked_fill(maximum == float("-inf"), 0.0) if sinks is None else maximum.maximum(sinks)
    weights = (scores - maximum).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks - maximum).exp()
    return _dropped(weights / total.clamp_min(TINY), piece, attention) @ values, maximum, total


def _backward(
    piece: Piece, attention: Attention, cotangent: Tensor, output: Tensor, maximum: Tensor, total: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients from the *given* softmax statistics and output, as ring attention needs; that of sinks is ``[N]``."""
    scores, values = _scores(piece, attention)
    group = piece.query.size(-3) // piece.key.size(-3)
    total = total.clamp_min(TINY)
    weights = (scores - maximum).exp() / total
    delta = (cotangent * output).sum(-1, keepdim=True)
    d_weights = _dropped(cotangent @ values.transpose(-1, -2), piece, attention)
    d_scores = weights * (d_weights - delta) * attention.attributes.scale

    def ungroup(gradient: Tensor) -> Tensor:
        summed: Tensor = gradient.unflatten(-3, (-1, group)).sum(-3)
        return summed

    d_query = d_scores @ piece.key.repeat_interleave(group, -3)
    d_key = ungroup(d_scores.transpose(-1, -2) @ piece.query)
    d_value = ungroup(_dropped(weights, piece, attention).transpose(-1, -2) @ cotangent)
    d_sinks = None
    if attention.sinks is not None:
        of_sinks = (attention.sinks[:, None, None] - maximum).exp() / total * -delta  # [..., N, Sq, 1]
        d_sinks = of_sinks.flatten(-2).sum(-1).reshape(-1, len(attention.sinks)).sum(0)
    return d_query, d_key, d_value, d_sinks


def _attend(attention: Attention, outputs: tuple[Tensor, ...]) -> None:
    """Write ``softmax_max``, ``softmax_sum`` and the output; the third of the four ``outputs`` is not written."""
    maximum, total, _, output = outputs
    for tensor in (maximum, total, output):
        tensor.zero_()  # rows behind the last sequence of a packed batch
    for piece in attention.pieces:
        found, top, sums = _forward(piece, attention)
        output[piece.rows].copy_(attention.from_heads_first(found))
        for target, statistic in zip((maximum, total), (top, sums), strict=True):
            place = _statistics(target, piece, attention)
            place.copy_(statistic.expand_as(place))


def _statistics(statistic: Tensor, piece: Piece, attention: Attention) -> Tensor:
    """A sequence's part of a softmax statistic, heads first: a view. Packed ones are ``[T, N, 8]`` by their shape.

    In layout TND the kernel writes each sequence with its heads first, whatever the tensor's shape says
    (``softmax_layout`` changes that); MindSpeed's ring attention reads it so (``flatten_softmax``).
    """
    if attention.attributes.layout != "TND":
        return statistic
    part = statistic[piece.rows]
    return part.view(part.size(1), part.size(0), part.size(2))


def _differentiate(
    attention: Attention,
    cotangent: Tensor,
    forward: tuple[Tensor, Tensor, Tensor],
    gradients: tuple[Tensor, Tensor, Tensor],
    sink_gradient: Tensor | None = None,
) -> None:
    """Compute the gradients of query, key, value and sinks; ``forward``: ``softmax_max``, ``softmax_sum``, output."""
    maximum, total, output = forward
    written = [*gradients] if sink_gradient is None else [*gradients, sink_gradient]
    for gradient in written:
        gradient.zero_()
    for piece in attention.pieces:
        statistics = [_statistics(one.contiguous(), piece, attention)[..., :1] for one in (maximum, total)]
        given = (attention.heads_first(one[piece.rows], attention.attributes.heads) for one in (cotangent, output))
        *found, d_sinks = _backward(piece, attention, *given, *statistics)
        places = (piece.rows, piece.columns, piece.columns)
        for target, gradient, place in zip(gradients, found, places, strict=True):
            target[place].copy_(attention.from_heads_first(gradient))
        if sink_gradient is not None and d_sinks is not None:
            sink_gradient += d_sinks


def _forward_entry(*arguments: Any) -> None:
    """``aclnnFlashAttentionScore`` and ``...VarLenScore``; lengths come with layout TND only."""
    query, key, value, bias, drop, padding, mask, prefix, *lengths = arguments[:-12]
    _refuse_unmodelled(bias, padding, prefix)
    attributes = Attributes(*arguments[-12:-4])
    _attend(Attention(query, key, value, mask, lengths, attributes, drop, None), arguments[-4:])


def _forward_entry_with_sinks(*arguments: Any) -> None:
    """``aclnnFlashAttentionScoreV3``."""
    query, key, value, bias, drop, padding, mask, sinks, prefix, *starts = arguments[:-13]
    _refuse_unmodelled(bias, padding, prefix, *starts)
    attributes = Attributes(*arguments[-13:-5])
    _attend(Attention(query, key, value, mask, [], attributes, drop, sinks), arguments[-4:])


def _packed_forward_entry_with_sinks(*arguments: Any) -> None:
    """``aclnnFlashAttentionVarLenScoreV5``."""
    query, query_rope, key, key_rope, value, bias, drop, padding, mask, sinks, prefix, *others = arguments[:-14]
    *lengths, query_start, key_start = others
    _refuse_unmodelled(bias, padding, prefix, query_rope, key_rope, query_start, key_start, arguments[-5])
    attributes = Attributes(*arguments[-14:-6])
    _attend(Attention(query, key, value, mask, lengths, attributes, drop, sinks), arguments[-4:])


def _backward_entry(*arguments: Any) -> None:
    """``aclnnFlashAttentionScoreGrad`` and ``...UnpaddingScoreGrad``."""
    query, key, value, cotangent, bias, drop, padding, mask, *given = arguments[:-12]
    maximum, total, _, output, prefix, *lengths = given
    _refuse_unmodelled(bias, padding, prefix)
    attention = Attention(query, key, value, mask, lengths, Attributes(*arguments[-12:-4]), drop, None)
    _differentiate(attention, cotangent, (maximum, total, output), arguments[-4:-1])


def _backward_entry_with_sinks(*arguments: Any) -> None:
    """``aclnnFlashAttentionScoreGradV3``."""
    query, key, value, cotangent, bias, drop, padding, mask, *given = arguments[:-14]
    maximum, total, _, output, sinks, prefix, *starts = given
    _refuse_unmodelled(bias, padding, prefix, *starts)
    _refuse_float32(query, sinks)
    attention = Attention(query, key, value, mask, [], Attributes(*arguments[-14:-6]), drop, sinks)
    _differentiate(attention, cotangent, (maximum, total, output), arguments[-5:-2], arguments[-1])


def _packed_backward_entry_with_sinks(*arguments: Any) -> None:
    """``aclnnFlashAttentionUnpaddingScoreGradV5``."""
    query, query_rope, key, key_rope, value, cotangent, bias, drop, padding, mask, *given = arguments[:-17]
    maximum, total, _, output, sinks, prefix, *others = given
    *lengths, query_start, key_start = others
    _refuse_unmodelled(bias, padding, prefix, query_rope, key_rope, query_start, key_start, arguments[-8])
    _refuse_float32(query, sinks)
    require(query.size(-1) == value.size(-1), "in this version heads of values must be as large as heads of queries")
    attention = Attention(query, key, value, mask, lengths, Attributes(*arguments[-17:-9]), drop, sinks)
    d_query, _, d_key, _, d_value, _, d_sinks = arguments[-7:]
    _differentiate(attention, cotangent, (maximum, total, output), (d_query, d_key, d_value), d_sinks)


def _refuse_float32(query: Tensor, sinks: Tensor | None) -> None:
    require(sinks is None or query.dtype != torch.float32, "the gradient with sinks does not support float32")


def _refuse_unmodelled(bias: Any, padding: Any, prefix: Any, *others: Any) -> None:
    require(bias is None, "pse is not modelled")
    require(padding is None, "padding_mask is not supported (torch_npu's documentation)")
    require(not prefix, "prefix is not modelled")
    for other in others:
        given = other is not None and (other.numel() if isinstance(other, torch.Tensor) else len(other))
        require(not given, "rope, start indices and softmax_layout are not modelled")


KERNELS = {
    "aclnnFlashAttentionScore": _forward_entry,
    "aclnnFlashAttentionVarLenScore": _forward_entry,
    "aclnnFlashAttentionScoreV3": _forward_entry_with_sinks,
    "aclnnFlashAttentionVarLenScoreV5": _packed_forward_entry_with_sinks,
    "aclnnFlashAttentionScoreGrad": _backward_entry,
    "aclnnFlashAttentionUnpaddingScoreGrad": _backward_entry,
    "aclnnFlashAttentionScoreGradV3": _backward_entry_with_sinks,
    "aclnnFlashAttentionUnpaddingScoreGradV5": _packed_backward_entry_with_sinks,
}
