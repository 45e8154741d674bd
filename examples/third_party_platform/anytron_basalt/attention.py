"""Basalt's attention: one sequence after the other. Short, slow, and right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import basalt_sdk
import torch
from torch import Tensor
from torch.nn import functional

from anytron import EngineError
from anytron.kernels import is_causal

if TYPE_CHECKING:
    from anytron.kernels import AttentionCall, AttentionSpec

LENGTHS = "basalt_lengths"
"""Basalt's own kernel mode: causal attention in packed sequences whose lengths the library was told."""


class BasaltAttention:
    """The kernel of one layer: an :class:`anytron.kernels.AttentionKernel`.

    Args:
        spec: The layer.
        tile: Packed sequences of the mode :data:`LENGTHS` start at multiples of so many tokens.
    """

    description = "Basalt, one sequence after the other"

    def __init__(self, spec: AttentionSpec, tile: int) -> None:
        self.spec, self.tile = spec, tile

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        """Return ``[T, H, Dv]`` in thd and ``[B, S, H, Dv]`` in bshd."""
        causal = call.mode == LENGTHS or is_causal(call, "attention kernel of Basalt")
        if call.format == "bshd":
            return self._attend(query, key, value, call, causal)
        assert call.cu_seqlens_q is not None
        assert call.cu_seqlens_kv is not None
        queries = _parts(call.cu_seqlens_q, call.cu_seqlens_q_padded)
        keys = _parts(call.cu_seqlens_kv, call.cu_seqlens_kv_padded)
        if call.mode == LENGTHS:
            self._check(queries)
        out = query.new_zeros(*query.shape[:-1], value.shape[-1])  # MLA's values may come as wide as its queries
        for of_queries, of_keys in zip(queries, keys, strict=True):
            one = (query[None, of_queries], key[None, of_keys], value[None, of_keys])
            out[of_queries] = self._attend(*one, call, causal)[0]
        return out

    def _check(self, sequences: list[slice]) -> None:
        """Refuse what would be read wrongly: a kernel that relies on something says so, and does not guess."""
        lengths = tuple(one.stop - one.start for one in sequences)
        if lengths != basalt_sdk.lengths():
            raise EngineError(
                "Basalt's library has the lengths of other sequences.",
                where="attention kernel of plugin basalt",
                why=f"its lengths are {basalt_sdk.lengths()}, and the sequences have {lengths}",
                fix="call the kernel inside the scope of its micro-batch",
            )
        if unaligned := [one.start for one in sequences if one.start % self.tile]:
            raise EngineError(
                "A sequence does not start at a tile.",
                where="attention kernel of plugin basalt",
                why=f"it starts at token {unaligned[0]}, but a tile has {self.tile} tokens",
                fix="plan layouts with the platform's layout_constraints",
            )

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, causal: bool) -> Tensor:
        """Attend in ``[B, S, H, D]``, in float32 or wider."""
        hidden = self._hidden(query.shape[1], key.shape[1], causal, query.device)
        hidden = hidden if call.mask is None else hidden | call.mask
        queries, keys, values = (operand.transpose(1, 2) for operand in (query, key, value))
        group = queries.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = (queries @ keys.transpose(-1, -2)).to(wide) * self.spec.scale
        if call.sinks is None:
            # A row that sees nothing has no softmax: let it see everything, and drop the result.
            blind = hidden.all(dim=-1, keepdim=True)
            weights = scores.masked_fill(hidden & ~blind, -torch.inf).softmax(-1).masked_fill(blind, 0.0)
        else:
            sinks = call.sinks.to(wide)[:, None, None].expand(*scores.shape[:3], 1)
            weights = torch.cat([scores.masked_fill(hidden, -torch.inf), sinks], dim=-1).softmax(-1)[..., :-1]
        out = functional.dropout(weights, call.dropout).to(value.dtype) @ values
        return out.transpose(1, 2)

    def _hidden(self, queries: int, keys: int, causal: bool, device: torch.device) -> Tensor:
        """Which keys a query does not see, by their positions: bool ``[Sq, Sk]``. The last query is at the last key."""
        distance = torch.arange(keys, device=device) - torch.arange(keys - queries, keys, device=device)[:, None]
        hidden = distance > 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
        left, right = self.spec.traits.window or (-1, -1)
        hidden = hidden | (distance < -left) if left >= 0 else hidden
        return hidden | (distance > right) if right >= 0 else hidden


def _parts(lengths: Tensor, starts: Tensor | None) -> list[slice]:
    """Where each sequence lies in the buffer."""
    begins = (lengths if starts is None else starts)[:-1]
    return [slice(*ends) for ends in torch.stack([begins, begins + lengths.diff()], dim=1).tolist()]
