"""Scaled dot-product attention, packed and padded: the neutral default of ``attention_kernel``.

It reads the neutral kernel modes, which every kernel must know: the values of Transformer Engine's ``attn_mask_type``.
Layers other than the language model's self-attention are always called with one of these modes. Unlike in Transformer
Engine, causality is always aligned to the last query and the last key.

Shapes: B sequences, S positions, T packed tokens, H heads, D head size; q and k for queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention

from anytron.base.errors import HookContractError
from anytron.kernels import invariant
from anytron.kernels.contract import zeros_from
from anytron.kernels.packed_sequences import Restriction, Window, forbidden_pairs, plan_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from anytron.kernels.contract import AttentionCall, AttentionKernel, AttentionSpec


PACKED: Mapping[str, bool] = MappingProxyType({"padding": False, "padding_causal": True})
"""Modes of thd, and whether they are causal. Padding is known by ``cu_seqlens``."""

PADDED: Mapping[str, bool] = MappingProxyType({"no_mask": False, "causal": True, **PACKED, "arbitrary": False})
"""Modes of bshd, and whether they are causal by themselves."""

WITH_TENSOR = frozenset({"padding", "padding_causal", "arbitrary"})
"""Modes of bshd whose mask has a tensor; masks of the other modes have no tensor."""


def make_attention(spec: AttentionSpec, operator: Callable[..., Tensor] | None = None) -> AttentionKernel:
    """Return an attention kernel for one layer, built on torch's ``scaled_dot_product_attention``.

    A platform may pass another ``operator`` with the same signature. With ``spec.invariant`` the default is
    :func:`anytron.kernels.invariant.attention`.

    Sequences of similar length share a call in thd, so that the number of calls grows with the
    logarithm of the range of lengths, not with the number of sequences. Where queries and keys differ in number,
    causality is aligned bottom right: the last query sees the last key. Padding rows (thd) and rows whose keys are all
    masked give zeros and no gradient.

    The kernel knows only the neutral modes (see :func:`is_causal`); any other mode raises
    :class:`~anytron.base.errors.HookContractError`.
    """
    if operator is None:
        operator = invariant.attention if spec.invariant else scaled_dot_product_attention
    return _Attention(operator, spec.scale, spec.traits.window)


def is_causal(call: AttentionCall, kernel: str) -> bool:
    """Return whether a neutral mode is causal. Padding is in ``cu_seqlens`` or in the mask tensor, not in the mode.

    Args:
        call: The call of the kernel.
        kernel: Name of the kernel, for the message.

    Raises:
        HookContractError: The mode is not neutral, or its mask tensor is missing or superfluous.
    """
    known = PACKED if call.format == "thd" else PADDED
    causal = known.get(call.mode)
    if causal is None:
        raise HookContractError(
            f"The {kernel} does not support the kernel mode '{call.mode}'.",
            where=f"attention, format {call.format}",
            why=f"{_source(call)}; this kernel supports {', '.join(sorted(known))}",
            fix="return one of these modes from build_attn_mask, or implement attention_kernel for this mode in the "
            "same plugin",
        )
    expected = call.format == "bshd" and call.mode in WITH_TENSOR
    if expected != (call.mask is not None):
        raise HookContractError(
            f"The kernel mode '{call.mode}' does not match its mask.",
            where=f"{kernel}, format {call.format}",
            why=f"{_source(call)}; this mode "
            + (
                "needs a mask tensor, but the call has no tensor"
                if expected
                else "allows no mask tensor, but the call has one"
            ),
            fix="let build_attn_mask return a mode that matches its tensor",
        )
    return causal


def _source(call: AttentionCall) -> str:
    return (
        f"build_attn_mask of plugin '{call.mode_from}' returned this mode"
        if call.mode_from
        else "the caller passed this mode"
    )


@dataclass(frozen=True)
class _Attention:
    operator: Callable[..., Tensor]
    scale: float
    limit: Window | None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        causal = is_causal(call, "neutral attention kernel")
        window = _binding_window(self.limit, causal)
        attend = self._padded if call.format == "bshd" else self._packed
        return attend(query, key, value, call, causal, window)

    def _padded(
        self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, causal: bool, window: Window | None
    ) -> Tensor:
        rows, columns = query.shape[1], key.shape[1]
        forbidden = call.mask
        if window is not None or (causal and (rows != columns or forbidden is not None)):
            by_position = forbidden_pairs(rows, columns, causal, window, query.device)
            assert by_position is not None
            forbidden = by_position if forbidden is None else forbidden | by_position
        restriction = None if forbidden is None else Restriction.of(forbidden)
        return self._dense(query, key, value, restriction, call, causal)

    def _packed(
        self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, causal: bool, window: Window | None
    ) -> Tensor:
        plan = plan_for(call, query.shape[0], key.shape[0])
        if plan is None:
            return zeros_from((*query.shape[:-1], value.shape[-1]), query, key, value, call.sinks)
        rows, columns = [group.rows for group in plan.groups], [group.columns for group in plan.groups]
        queries = plan.split(query, plan.queries, rows)
        keys, values = (plan.split(operand, plan.keys, columns) for operand in (key, value))
        outputs = [
            self._dense(q, k, v, group.restriction(causal, window), call, causal)
            for q, k, v, group in zip(queries, keys, values, plan.groups, strict=True)
        ]
        return plan.join(outputs, query.shape[0])

    def _dense(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        restriction: Restriction | None,
        call: AttentionCall,
        causal: bool,
    ) -> Tensor:
        """Attend in a dense batch ``[B, Sq, H, D]`` -> ``[B, Sq, H, Dv]``.

        ``restriction`` holds every restriction; if it is None, ``causal`` does, and there are as many queries as keys.
        """
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if call.sinks is not None:
            return _with_sinks(query, key, value, restriction, call, causal, self.scale).transpose(1, 2)
        visible, blind = (None, None) if restriction is None else restriction
        output = self.operator(
            query,
            key,
            value,
            attn_mask=visible,
            is_causal=causal and restriction is None,
            dropout_p=call.dropout,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return (output if blind is None else output.masked_fill(blind, 0.0)).transpose(1, 2)


def _binding_window(window: Window | None, causal: bool) -> Window | None:
    """The window, if it hides anything that causality does not."""
    if window is None:
        return None
    left, right = window
    right = -1 if causal else right
    return None if left < 0 and right < 0 else (left, right)


def _with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    restriction: Restriction | None,
    call: AttentionCall,
    causal: bool,
    scale: float,
) -> Tensor:
    """Attend with one more logit per head in the softmax's denominator, which carries no value.

    As in gpt-oss (transformers ``modeling_gpt_oss.eager_attention_forward``), the softmax in float32
    or the operands' wider type. A row without keys gives zero.
    """
    assert call.sinks is not None
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    if (
        restriction is None
        and (forbidden := forbidden_pairs(query.shape[2], key.shape[2], causal, None, query.device)) is not None
    ):
        restriction = Restriction(~forbidden, None)
    precision = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ key.transpose(-1, -2)).to(precision) * scale
    if restriction is not None:
        scores = scores.masked_fill(~restriction.visible, -torch.inf)
    sinks = call.sinks.to(precision).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    output = drop(weights, call.dropout).to(value.dtype) @ value
    return output if restriction is None or restriction.blind is None else output.masked_fill(restriction.blind, 0.0)
